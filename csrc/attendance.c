/* Training steps without everybody; the picture and the proof are in attendance.h. */
#include "attendance.h"

#include <stdlib.h>

#include "staged.h"

int plx_gone(const struct plx_group *g, uint32_t rank, uint64_t step) {
  uint64_t left = atomic_load_explicit(&plx_rank_of(g, rank)->left_after, memory_order_acquire);
  return left != 0 && left - 1 < step;
}

int plx_roll_call(struct plx_group *g, const struct plx_call *mine) {
  unsigned char absent[PLX_MAX_WORLD];
  uint32_t first = g->world, num_waiting = 0, num_gone = 0, last_gone = 0, background = 0;
  for (uint32_t r = 0; r < g->world; r++) {
    absent[r] = 1;
    if (plx_gone(g, r, g->step)) {
      num_gone++;
      last_gone = r;
      continue;
    }
    const struct plx_call *c = &plx_rank_of(g, r)->call[g->turn & 1];
    if (!(c->flags & PLX_FLAG_STEP)) {
      num_waiting++;
      background |= c->flags & PLX_FLAG_BACKGROUND;
    } else if (!(c->flags & PLX_FLAG_STANDS_IN)) {
      absent[r] = 0;
      if (first == g->world) first = r;
    }
  }
  if (first == g->world) /* nobody steps: the ranks that are left can't do what needs everybody */
    return num_gone == 0 ? PLX_OK : plx_poison(g, PLX_PEER_LOST, last_gone);
  if (num_waiting == 0 && num_gone == g->num_gone) return PLX_OK;
  if (background || (mine->flags & PLX_FLAG_STANDS_IN)) return plx_poison(g, PLX_MISMATCH, g->rank);
  for (uint32_t r = 0; r < g->world; r++) g->absent[r] = absent[r];
  g->newly_gone = num_gone != g->num_gone;
  g->num_gone = num_gone;
  g->apart |= num_waiting != 0;
  g->step_call = plx_rank_of(g, first)->call[g->turn & 1];
  g->turn++;
  return PLX_APART;
}

/* "file:line" of the call of `rank`; empty where it is not known. */
static const char *place_of(const struct plx_group *g, uint32_t rank) {
  const struct plx_rank *r = plx_rank_of(g, rank);
  return r->sites[r->call[g->turn & 1].site % PLX_SITES];
}

/* Who ran out of data leaves its loop and waits at the line to which the others come. Who waits at another, under `if
 * rank == 0` say, has not run out, even where the others come to a call of the same kind in the end. */
static int at_one_place(const struct plx_group *g) {
  const char *first = place_of(g, 0);
  for (uint32_t r = 1; r < g->world; r++) {
    const char *place = place_of(g, r);
    if (*first != 0 && *place != 0 && strncmp(first, place, PLX_SITE_BYTES) != 0) return 0;
  }
  return 1;
}

int plx_meet(struct plx_group *g, const struct plx_call *mine) {
  if (!g->apart || (mine->flags & PLX_FLAG_STEP)) return PLX_OK;
  if (!at_one_place(g)) return plx_poison(g, PLX_MISMATCH, g->rank);
  for (uint32_t r = 0; r < g->world; r++) g->absent[r] = 0;
  g->apart = 0;
  g->missed = 0;
  g->turn++;
  return PLX_REJOIN;
}

void plx_give_up(struct plx_group *g, int code) {
  if (g->resumed != NULL) plx_record_leave(g, g->resumed, code);
  g->resumed = NULL;
}

int plx_present_root(const struct plx_group *g, int root) {
  if (root < 0 || root >= (int)g->world || !g->absent[root]) return root;
  for (uint32_t r = 0; r < g->world; r++)
    if (!g->absent[r]) return (int)r;
  return root;
}

/* Zeros from a rank that is no more. Behind the gate of turn t everybody has read what it needed of turn t - 1, and in
 * this turn nobody reads a stage: all found themselves apart. */
static void clear_stages(struct plx_group *g) {
  for (uint32_t r = 0; r < g->world; r++)
    if (plx_gone(g, r, g->step))
      for (uint64_t turn = 0; turn < 2; turn++) {
        memset(plx_stage_of(g, r, turn), 0, g->stage_bytes);
        plx_rank_of(g, r)->call[turn].heap = PLX_NO_HEAP;
      }
}

static int gather_nothing(struct plx_group *g, struct plx_wait *w, const struct plx_call *c, void *zeros, void *scratch) {
  void *out[PLX_MAX_WORLD];
  size_t bytes[PLX_MAX_WORLD];
  for (uint32_t r = 0; r < g->world; r++) out[r] = scratch, bytes[r] = c->count;
  struct plx_origin nowhere = {0, 0, NULL};
  return plx_gather(g, w, &nowhere, zeros, out, bytes, c->dtype, c->root);
}

/* A round of gradients: the gates of plx_board_meet. */
static int watch_round(struct plx_group *g, struct plx_wait *w, const struct plx_call *theirs) {
  struct plx_call call;
  int code = plx_begin(g, w, &call, PLX_GRADIENTS, theirs->count, PLX_BYTES, PLX_SUM, -1);
  if (code != PLX_OK) return code;
  call.digest = theirs->digest;
  plx_publish(g, &call);
  code = plx_first_gate(g, w, &call);
  if (code != PLX_OK) return code;
  g->missed++;
  g->turn++;
  return plx_gate(g, w);
}

int plx_stand_in(struct plx_group *g, struct plx_wait *w) {
  uint32_t lowest = 0;
  while (g->absent[lowest]) lowest++;
  if (!g->absent[g->rank]) {
    if (g->newly_gone && lowest == g->rank) clear_stages(g);
    return PLX_OK;
  }
  struct plx_call c = g->step_call;
  size_t width = plx_dtype_size(c.dtype), bytes = c.kind == PLX_ALL_REDUCE ? c.count * width : c.count;
  struct plx_origin nowhere = {0, 0, NULL};
  unsigned char *zeros = NULL;
  if (c.kind != PLX_GRADIENTS && (zeros = calloc(2, bytes + 64)) == NULL) return plx_poison(g, PLX_NO_MEMORY, g->rank);
  int code;
  uint32_t role = g->role;
  g->role = PLX_FLAG_STEP | PLX_FLAG_STANDS_IN;
  if (c.kind == PLX_GRADIENTS)
    code = watch_round(g, w, &c);
  else if (c.kind == PLX_BROADCAST)
    code = plx_broadcast(g, w, &nowhere, zeros, bytes, c.dtype, plx_present_root(g, c.root));
  else if (c.kind == PLX_ALL_REDUCE && (c.redop == PLX_SUM || c.redop == PLX_MAX))
    code = plx_all_reduce(g, w, &nowhere, zeros, zeros, c.count, c.dtype, c.redop, -1);
  else if (c.kind == PLX_ALL_GATHER && c.digest == 0)
    code = gather_nothing(g, w, &c, zeros, zeros + bytes + 64);
  else /* nothing that a training step of ours calls */
    code = plx_poison(g, PLX_MISMATCH, g->rank);
  g->role = role;
  free(zeros);
  return code == PLX_APART ? plx_poison(g, PLX_MISMATCH, g->rank) : code;
}

int plx_board_meet(struct plx_board *b, struct plx_wait *w, const struct plx_origin *o) {
  struct plx_group *g = b->g;
  struct plx_call call;
  int code = plx_begin(g, w, &call, PLX_GRADIENTS, b->num_buckets, PLX_BYTES, PLX_SUM, -1);
  if (code != PLX_OK) return code;
  call.digest = b->flags << 16 ^ b->round;
  struct plx_record *record = plx_record_enter(g, &call, o->site, -1, o->ndim, o->shape);
  plx_publish(g, &call);
  code = plx_first_gate(g, w, &call);
  if (code != PLX_OK) return plx_finish(g, record, &call, code);
  uint32_t ranks[PLX_MAX_WORLD], n = 0, mine = 0;
  for (uint32_t r = 0; r < g->world; r++) {
    if (g->absent[r]) { /* it gave some gradients of this round, and does something else: that is no lack of data */
      if (plx_board_has_begun(b, r)) return plx_finish(g, record, &call, plx_poison(g, PLX_MISMATCH, g->rank));
      continue;
    }
    if (r == g->rank) mine = n;
    ranks[n++] = r;
  }
  for (uint32_t i = 0; i < b->num_buckets; i++) plx_board_reduce(b, i, ranks, n, mine);
  b->left = 0;
  g->missed++;
  g->turn++;
  return plx_finish(g, record, &call, plx_gate(g, w));
}

void plx_leave_in_order(struct plx_group *g) {
  struct plx_rank *me = plx_rank_of(g, g->rank);
  atomic_store_explicit(&me->left_after, g->step + 1, memory_order_seq_cst);
  /* Gates count us as arrived. Those of a crowded group look at all ranks once somebody has gone. */
  atomic_store_explicit(&me->step, UINT64_MAX, memory_order_seq_cst);
  atomic_fetch_add_explicit(&g->header->gone, 1, memory_order_seq_cst);
}
