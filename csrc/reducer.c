/* This file reduces buckets of gradients; the picture and the proof are in reducer.h. */
#include "reducer.h"

#include <sched.h>
#include <string.h>

#include "agreement.h"
#include "futex.h"

size_t plx_reducer_bytes(uint32_t num_buckets) { return ((size_t)num_buckets + 1) * sizeof(struct plx_flags); }

static struct plx_flags *flags_of(const struct plx_reducer *b, uint32_t rank, uint32_t bucket) {
  return (struct plx_flags *)(b->g->heaps[rank] + b->flags) + bucket;
}

/* The last line is a bell: its `ready` word changes whenever this rank has changed any flag; its `done` word counts the
 * threads that sleep on it. */
static struct plx_flags *bell_of(const struct plx_reducer *b, uint32_t rank) { return flags_of(b, rank, b->num_buckets); }

static void ring(struct plx_reducer *b) {
  struct plx_flags *bell = bell_of(b, b->g->rank);
  atomic_fetch_add_explicit(&bell->ready, 1, memory_order_seq_cst);
  if (atomic_load_explicit(&bell->done, memory_order_seq_cst) != 0) plx_futex_wake_all(&bell->ready);
}

void plx_reducer_begin(struct plx_reducer *b) {
  b->round++;
  b->left = b->num_buckets;
  for (uint32_t i = 0; i < b->num_buckets; i++) b->buckets[i].reduced = 0;
}

int plx_reducer_ready(struct plx_reducer *b, uint32_t bucket, uint64_t offset) {
  if (bucket >= b->num_buckets) return PLX_INVALID;
  struct plx_bucket *k = &b->buckets[bucket];
  k->all = 1;
  if (offset > b->g->heap_bytes || k->count * k->width > b->g->heap_bytes - offset) return PLX_INVALID;
  struct plx_flags *flags = flags_of(b, b->g->rank, bucket);
  flags->offset = offset;
  atomic_store_explicit(&flags->ready, b->round, memory_order_release);
  ring(b);
  return PLX_OK;
}

int plx_reducer_ready_slice(struct plx_reducer *b, uint32_t bucket, uint64_t offset, uint64_t start, uint64_t stop) {
  if (bucket >= b->num_buckets || start > stop || stop > b->buckets[bucket].count) return PLX_INVALID;
  int code = plx_reducer_ready(b, bucket, offset);
  struct plx_bucket *k = &b->buckets[bucket];
  k->all = 0;
  k->start = start;
  k->stop = stop;
  return code;
}

/* A rank may be a round ahead of us: it leaves a round when it has seen all flags, and we may not have looked yet. */
static int reached(const struct plx_reducer *b, _Atomic uint32_t *flag) {
  return (int32_t)(atomic_load_explicit(flag, memory_order_acquire) - b->round) >= 0;
}

static int all_ready(const struct plx_reducer *b, uint32_t bucket) {
  for (uint32_t r = 0; r < b->g->world; r++)
    if (!reached(b, &flags_of(b, r, bucket)->ready)) return 0;
  return 1;
}

/* Slices start on cache lines, so that no two ranks write into one. */
static uint64_t slice_start(const struct plx_bucket *k, uint32_t rank, uint32_t world) {
  uint64_t bytes = k->count * k->width, lines = (bytes + 63) / 64, at = lines * rank / world * 64;
  return at < bytes ? at : bytes;
}

/* Reduce our slice of a bucket that all ranks have, into the memory of each. */
static void reduce_slice(struct plx_reducer *b, uint32_t bucket) {
  struct plx_group *g = b->g;
  const struct plx_bucket *k = &b->buckets[bucket];
  const void *src[PLX_MAX_WORLD];
  unsigned char *bucket_of[PLX_MAX_WORLD];
  for (uint32_t r = 0; r < g->world; r++) bucket_of[r] = g->heaps[r] + flags_of(b, r, bucket)->offset;
  uint64_t end = slice_start(k, g->rank + 1, g->world);
  size_t block = 16384 / k->width * k->width; /* the result stays in the first-level cache while it is handed out */
  for (uint64_t at = slice_start(k, g->rank, g->world); at < end; at += block) {
    size_t size = end - at < block ? end - at : block;
    for (uint32_t r = 0; r < g->world; r++) src[r] = bucket_of[r] + at;
    unsigned char *mine = bucket_of[g->rank] + at;
    k->kernel(mine, src, g->world, size / k->width);
    for (uint32_t i = 1; i < g->world; i++) memcpy(bucket_of[(g->rank + i) % g->world] + at, mine, size);
  }
}

/* Reduce the slice that this rank alone needs, into its own memory. */
static void reduce_needed(struct plx_reducer *b, uint32_t bucket) {
  struct plx_group *g = b->g;
  const struct plx_bucket *k = &b->buckets[bucket];
  const void *src[PLX_MAX_WORLD];
  size_t block = 16384 / k->width;
  for (uint64_t at = k->start; at < k->stop; at += block) {
    size_t n = k->stop - at < block ? k->stop - at : block;
    for (uint32_t r = 0; r < g->world; r++) src[r] = g->heaps[r] + flags_of(b, r, bucket)->offset + at * k->width;
    k->kernel((void *)(uintptr_t)src[g->rank], src, g->world, n);
  }
}

uint32_t plx_reducer_poll(struct plx_reducer *b) {
  for (uint32_t i = 0; i < b->num_buckets && b->left != 0; i++) {
    struct plx_bucket *k = &b->buckets[i];
    if (k->reduced || !all_ready(b, i)) continue;
    if (k->all) reduce_slice(b, i);
    else reduce_needed(b, i);
    k->reduced = 1;
    b->left--;
    atomic_store_explicit(&flags_of(b, b->g->rank, i)->done, b->round, memory_order_release);
    ring(b);
  }
  return b->left;
}

static int is_ready(const struct plx_reducer *b, uint32_t rank) {
  for (uint32_t k = 0; k < b->num_buckets; k++)
    if (!reached(b, &flags_of(b, rank, k)->ready)) return 0;
  return 1;
}

static int is_done(const struct plx_reducer *b, uint32_t rank) {
  for (uint32_t k = 0; k < b->num_buckets; k++)
    if (!reached(b, &flags_of(b, rank, k)->done)) return 0;
  return 1;
}

/* Return the rank to wait for: one whose gradients are missing, else one that has not reduced all its slices, else our
 * own. All that wait for gradients wake when they come; waiting for slices first would wake one by one. */
static uint32_t find_late(const struct plx_reducer *b) {
  for (int want_done = 0; want_done < 2; want_done++)
    for (uint32_t i = 1; i < b->g->world; i++) {
      uint32_t r = (b->g->rank + i) % b->g->world;
      if (!(want_done ? is_done(b, r) : is_ready(b, r))) return r;
    }
  return b->g->rank;
}

/* A rank that calls something else instead rings no bell: only looking tells. That asks the system about every peer, so it
 * is done once in this time, not whenever one of them rings; a checker has no time, and looks always. */
#define SLEEP_NS (PLX_SLICE_NS / 5)
#ifndef PLX_JUDGE_NS
#define PLX_JUDGE_NS SLEEP_NS
#endif

static int is_complete(const struct plx_reducer *b, uint32_t rank) { return is_ready(b, rank) && is_done(b, rank); }

/* Tell the ranks that wait for us elsewhere that our program stands at the end of this round. */
static void tell_ending(const struct plx_reducer *b) {
  struct plx_rank *me = plx_rank_of(b->g, b->g->rank);
  /* This is a release: a rank that sees it sees, too, that no other reducer's round is told of any more. */
  atomic_store_explicit(&me->ending_round, (uint64_t)b->num_buckets << 32 | b->round, memory_order_release);
  atomic_store_explicit(&me->ending, b->flags + 1, memory_order_release);
}

/* Return whether the program of `rank` stands at the end of another reducer's round, in which a slice of ours is
 * missing: we shall not come to it before this round has ended, nor `rank` to this one before that. */
static int ends_another(const struct plx_reducer *b, uint32_t rank) {
  const struct plx_group *g = b->g;
  struct plx_rank *p = plx_rank_of(g, rank);
  uint64_t ending = atomic_load_explicit(&p->ending, memory_order_acquire);
  if (ending == 0 || ending == b->flags + 1) return 0;
  uint64_t what = atomic_load_explicit(&p->ending_round, memory_order_acquire);
  if (atomic_load_explicit(&p->ending, memory_order_acquire) != ending) return 0;
  struct plx_flags *ours = (struct plx_flags *)(g->heaps[g->rank] + (ending - 1));
  for (uint32_t i = 0; i < what >> 32; i++)
    if ((int32_t)(atomic_load_explicit(&ours[i].done, memory_order_acquire) - (uint32_t)what) < 0) return 1;
  return 0;
}

/* Return whether `rank` may still come to the end of this round: the proof is in reducer.h. */
static int judge(struct plx_reducer *b, uint32_t rank) {
  struct plx_group *g = b->g;
  struct plx_rank *p = plx_rank_of(g, rank);
  int lost = plx_peer_lost(g, rank), another = ends_another(b, rank);
  uint64_t theirs = atomic_load_explicit(&p->step, memory_order_acquire);
  if (is_complete(b, rank)) return PLX_OK; /* this is read last: what was read above, it did before the end of its round */
  if (another) return plx_poison(g, PLX_MISMATCH, g->rank);
  if (lost) return plx_poison(g, PLX_PEER_LOST, rank);
  if (plx_is_behind(g)) return PLX_OK;
  if (theirs <= g->step) return PLX_OK;
  return plx_poison(g, PLX_MISMATCH, g->rank);
}

static int wait_for_round(struct plx_reducer *b, struct plx_wait *w) {
  struct plx_group *g = b->g;
  uint64_t since = plx_now_ns(), judged = since;
  for (uint32_t looks = 1;; looks++) {
    uint32_t owed = plx_reducer_poll(b), late = find_late(b);
    if (owed == 0 && late == g->rank) return PLX_OK;
    if (late == g->rank) continue; /* the others are done, so all were ready: poll again does our part */
    if (g->oversubscribed) {
      if (looks % PLX_LOOKS_OVERSUBSCRIBED != 0) {
        sched_yield();
        continue;
      }
    } else {
      plx_relax();
      if (looks % PLX_LOOKS != 0 || plx_now_ns() - since < w->spin_ns) continue;
    }
    tell_ending(b);
    struct plx_flags *bell = bell_of(b, late);
    atomic_fetch_add_explicit(&bell->done, 1, memory_order_seq_cst);
    uint32_t seen = atomic_load_explicit(&bell->ready, memory_order_seq_cst);
    if (plx_reducer_poll(b) == owed && find_late(b) == late &&
        atomic_load_explicit(&g->header->poison, memory_order_seq_cst) == 0)
      plx_futex_wait(&bell->ready, seen, SLEEP_NS);
    atomic_fetch_sub_explicit(&bell->done, 1, memory_order_relaxed);

    int code = plx_poisoned(g, w);
    if (code != PLX_OK) return code;
    uint64_t now = plx_now_ns();
    if (now - judged < PLX_JUDGE_NS) continue;
    judged = now;
    for (uint32_t i = 1; code == PLX_OK && i < g->world; i++) {
      w->failed_rank = (int32_t)((g->rank + i) % g->world);
      code = judge(b, (uint32_t)w->failed_rank);
    }
    if (code == PLX_OK) {
      w->failed_rank = (int32_t)late; /* this is the rank that we wait for: the caller may be told of it */
      code = plx_check_wait(g, w, late, since);
    }
    if (code != PLX_OK) return code;
  }
}

int plx_reducer_finish(struct plx_reducer *b, struct plx_wait *w) {
  struct plx_rank *me = plx_rank_of(b->g, b->g->rank);
  int code = wait_for_round(b, w);
  if (atomic_load_explicit(&me->ending, memory_order_relaxed) != 0)
    atomic_store_explicit(&me->ending, 0, memory_order_release);
  return code;
}
