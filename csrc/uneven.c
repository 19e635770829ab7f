/* This file carries out training steps without some ranks; the picture and the proof are in uneven.h. */
#include "uneven.h"

#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "collectives.h"

/* Return what a group with this policy knows of the ranks. */
static struct plx_uneven *of(const struct plx_group *g) { return (struct plx_uneven *)g->policy; }

static int check_participation(struct plx_group *g, const struct plx_call *mine) {
  struct plx_uneven *u = of(g);
  unsigned char absent[PLX_MAX_WORLD];
  uint32_t first = g->world, num_waiting = 0, num_gone = 0, last_gone = 0, background = 0;
  for (uint32_t r = 0; r < g->world; r++) {
    absent[r] = 1;
    if (plx_left_before(g, r, g->step)) {
      num_gone++;
      last_gone = r;
      continue;
    }
    const struct plx_call *c = &plx_rank_of(g, r)->call[g->phase & 1];
    if (!(c->flags & PLX_FLAG_STEP)) {
      num_waiting++;
      background |= c->flags & PLX_FLAG_BACKGROUND;
    } else if (!(c->flags & PLX_FLAG_SHADOW)) {
      absent[r] = 0;
      if (first == g->world) first = r;
    }
  }
  if (first == g->world) /* no rank steps: the ranks that are left can't do what needs all of them */
    return num_gone == 0 ? PLX_OK : plx_poison(g, PLX_PEER_LOST, last_gone);
  if (num_waiting == 0 && num_gone == u->policy.num_gone) return PLX_OK;
  if (background || (mine->flags & PLX_FLAG_SHADOW)) return plx_poison(g, PLX_MISMATCH, g->rank);
  for (uint32_t r = 0; r < g->world; r++) u->absent[r] = absent[r];
  u->newly_gone = num_gone != u->policy.num_gone;
  u->policy.num_gone = num_gone;
  u->policy.apart |= num_waiting != 0;
  u->step_call = plx_rank_of(g, first)->call[g->phase & 1];
  g->phase++;
  return PLX_RETRY_UNEVEN;
}

/* Return the "file:line" of the call of `rank`; it is empty where it is not known. */
static const char *place_of(const struct plx_group *g, uint32_t rank) {
  const struct plx_rank *r = plx_rank_of(g, rank);
  return r->call_sites[r->call[g->phase & 1].call_site % PLX_CALL_SITES];
}

/* A rank that ran out of data leaves its loop and waits at the line to which the others come. A rank that waits at
 * another line, under `if rank == 0` say, has not run out, even if the others come to a call of the same kind in the
 * end. */
static int at_one_place(const struct plx_group *g) {
  const char *first = place_of(g, 0);
  for (uint32_t r = 1; r < g->world; r++) {
    const char *place = place_of(g, r);
    if (*first != 0 && *place != 0 && strncmp(first, place, PLX_CALL_SITE_BYTES) != 0) return 0;
  }
  return 1;
}

static int check_return(struct plx_group *g, const struct plx_call *mine) {
  struct plx_uneven *u = of(g);
  if (!u->policy.apart || (mine->flags & PLX_FLAG_STEP)) return PLX_OK;
  if (!at_one_place(g)) return plx_poison(g, PLX_MISMATCH, g->rank);
  for (uint32_t r = 0; r < g->world; r++) u->absent[r] = 0;
  u->policy.apart = 0;
  u->missed = 0;
  g->phase++;
  return PLX_REJOIN;
}

void plx_allow_uneven(struct plx_group *g, struct plx_uneven *u) {
  u->policy.check_participation = check_participation;
  u->policy.check_return = check_return;
  g->policy = &u->policy;
}

int plx_present_root(const struct plx_group *g, int root) {
  const struct plx_uneven *u = of(g);
  if (u == NULL || root < 0 || root >= (int)g->world || !u->absent[root]) return root;
  for (uint32_t r = 0; r < g->world; r++)
    if (!u->absent[r]) return (int)r;
  return root;
}

/* Write zeros for a rank that is no more. After the sync of phase t all have read what they needed of phase t - 1, and
 * in this phase none reads a stage: all found themselves apart. */
static void clear_stages(struct plx_group *g) {
  for (uint32_t r = 0; r < g->world; r++)
    if (plx_left_before(g, r, g->step))
      for (uint64_t phase = 0; phase < 2; phase++) {
        memset(plx_stage_of(g, r, phase), 0, g->stage_bytes);
        plx_rank_of(g, r)->call[phase].heap = PLX_NO_HEAP;
      }
}

/* Return the call that a rank makes that is out of the step, in the place of those who are not. */
static const struct plx_origin shadow = {.flags = PLX_FLAG_STEP | PLX_FLAG_SHADOW};

static int gather_nothing(struct plx_group *g, struct plx_wait *w, const struct plx_call *c, void *zeros, void *scratch) {
  void *out[PLX_MAX_WORLD];
  size_t bytes[PLX_MAX_WORLD];
  for (uint32_t r = 0; r < g->world; r++) out[r] = scratch, bytes[r] = c->count;
  return plx_gather(g, w, &shadow, zeros, out, bytes, c->dtype, c->root);
}

/* Carry out a round of gradients: the syncs are those of plx_reducer_finish_uneven. */
static int watch_round(struct plx_group *g, struct plx_wait *w, const struct plx_call *theirs) {
  struct plx_call call;
  int code = plx_begin(g, w, &shadow, &call, PLX_GRADIENTS, theirs->count, PLX_BYTES, PLX_SUM, -1);
  if (code != PLX_OK) return code;
  call.digest = theirs->digest;
  plx_publish(g, &call);
  code = plx_sync_calls(g, w, &call);
  if (code != PLX_OK) return code;
  of(g)->missed++;
  g->phase++;
  return plx_sync(g, w);
}

static int shadow_call(struct plx_group *g, struct plx_wait *w, const struct plx_call *c) {
  if (c->kind == PLX_GRADIENTS) return watch_round(g, w, c);
  size_t bytes = c->kind == PLX_ALL_REDUCE ? c->count * plx_dtype_size(c->dtype) : c->count;
  unsigned char *zeros = calloc(2, bytes + 64);
  if (zeros == NULL) return plx_poison(g, PLX_NO_MEMORY, g->rank);
  int code;
  if (c->kind == PLX_BROADCAST)
    code = plx_broadcast(g, w, &shadow, zeros, bytes, c->dtype, plx_present_root(g, c->root));
  else if (c->kind == PLX_ALL_REDUCE && (c->redop == PLX_SUM || c->redop == PLX_MAX))
    code = plx_all_reduce(g, w, &shadow, zeros, zeros, c->count, c->dtype, c->redop, -1);
  else if (c->kind == PLX_ALL_GATHER && c->digest == 0)
    code = gather_nothing(g, w, c, zeros, zeros + bytes + 64);
  else /* nothing that a training step of ours calls */
    code = plx_poison(g, PLX_MISMATCH, g->rank);
  free(zeros);
  return code;
}

int plx_shadow_step(struct plx_group *g, struct plx_wait *w) {
  struct plx_uneven *u = of(g);
  uint32_t lowest = 0;
  while (u->absent[lowest]) lowest++;
  if (!u->absent[g->rank]) {
    if (u->newly_gone && lowest == g->rank) clear_stages(g);
    return PLX_OK;
  }
  struct plx_call theirs = u->step_call;
  int code = shadow_call(g, w, &theirs);
  return code == PLX_RETRY_UNEVEN ? plx_poison(g, PLX_MISMATCH, g->rank) : code;
}

int plx_reducer_finish_uneven(struct plx_reducer *b, struct plx_wait *w, const struct plx_origin *o) {
  struct plx_group *g = b->g;
  const struct plx_uneven *u = of(g);
  struct plx_call call;
  int code = plx_begin(g, w, o, &call, PLX_GRADIENTS, b->num_buckets, PLX_BYTES, PLX_SUM, -1);
  if (code != PLX_OK) return code;
  call.digest = b->flags << 16 ^ b->round;
  struct plx_record *record = plx_record_enter(g, &call, o, -1);
  plx_publish(g, &call);
  code = plx_sync_calls(g, w, &call);
  if (code != PLX_OK) return plx_finish(g, o, record, &call, code);
  uint32_t ranks[PLX_MAX_WORLD], n = 0, mine = 0;
  for (uint32_t r = 0; r < g->world; r++) {
    if (u->absent[r]) { /* it gave some gradients of this round, and does something else: that is no lack of data */
      if (plx_reducer_has_begun(b, r)) return plx_finish(g, o, record, &call, plx_poison(g, PLX_MISMATCH, g->rank));
      continue;
    }
    if (r == g->rank) mine = n;
    ranks[n++] = r;
  }
  for (uint32_t i = 0; i < b->num_buckets; i++) plx_reducer_reduce(b, i, ranks, n, mine);
  b->left = 0;
  of(g)->missed++;
  g->phase++;
  return plx_finish(g, o, record, &call, plx_sync(g, w));
}
