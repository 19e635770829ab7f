/* Ranks arrive and wait here, by atomics and futex, with a deadline on every wait. */
#include "sync.h"

#include <sched.h>

#include "futex.h"

/* A peer that is gone will never reach `step`; but it may have reached it just before it went. */
static int lost(struct plx_group *g, struct plx_wait *w, uint32_t peer, uint64_t step) {
  if (!plx_peer_lost(g, peer)) return PLX_OK;
  if (atomic_load_explicit(&plx_rank_of(g, peer)->step, memory_order_acquire) >= step) return PLX_OK;
  return plx_fail(g, w, PLX_PEER_LOST, peer);
}

/* Look at one peer's counter, and sleep only when it takes long; at once where more ranks than cores would look. */
static inline int wait_for_one(struct plx_group *g, struct plx_wait *w, uint32_t peer, uint64_t step, uint64_t *since) {
  struct plx_rank *p = plx_rank_of(g, peer);
  for (uint32_t looks = 1; atomic_load_explicit(&p->step, memory_order_acquire) < step; looks++) {
    uint64_t now;
    if (!g->oversubscribed) {
      plx_relax();
      if (looks % PLX_LOOKS != 0) continue; /* a pause is up to 140 cycles: look at the clock every few microseconds */
      now = plx_now_ns();
      if (*since == 0) *since = now;
      if (now - *since < w->spin_ns) continue;
    } else {
      if (looks < PLX_LOOKS_OVERSUBSCRIBED) {
        sched_yield();
        continue;
      }
      if (*since == 0) *since = plx_now_ns();
    }
    /* Announce the sleep first, look again, then sleep: a rank that arrives in between sees the announcement. */
    atomic_fetch_add_explicit(&p->sleepers, 1, memory_order_seq_cst);
    uint64_t seen = atomic_load_explicit(&p->step, memory_order_seq_cst);
    if (seen < step && atomic_load_explicit(&g->header->poison, memory_order_seq_cst) == 0)
      plx_futex_wait(plx_low_half(&p->step), (uint32_t)seen, plx_slice_ns(w, *since));
    atomic_fetch_sub_explicit(&p->sleepers, 1, memory_order_relaxed);
    if (atomic_load_explicit(&p->step, memory_order_acquire) >= step) break;
    int code = lost(g, w, peer, step);
    if (code == PLX_OK) code = plx_check_wait(g, w, peer, *since);
    if (code != PLX_OK) return code;
  }
  return PLX_OK;
}

/* Each rank has a core. */
static int wait_for_each(struct plx_group *g, struct plx_wait *w, uint64_t step) {
  uint64_t since = 0;
  for (uint32_t i = 1; i < g->world; i++) {
    int code = wait_for_one(g, w, (g->rank + i) % g->world, step, &since);
    if (code != PLX_OK) return code;
  }
  return PLX_OK;
}

int plx_await_rank(struct plx_group *g, struct plx_wait *w, uint32_t peer, uint64_t step) {
  uint64_t since = 0;
  return wait_for_one(g, w, peer, step, &since);
}

static int all_reached(const struct plx_group *g, uint64_t step) {
  for (uint32_t r = 0; r < g->world; r++)
    if (atomic_load_explicit(&plx_rank_of(g, r)->step, memory_order_seq_cst) < step) return 0;
  return 1;
}

/* More ranks than cores: yield the core a few times to those who still have to arrive, then sleep at the sync. */
static int wait_oversubscribed(struct plx_group *g, struct plx_wait *w, uint64_t step) {
  uint64_t since = plx_now_ns();
  for (int yields = 0;; yields++) {
    uint32_t seen = atomic_load_explicit(&g->header->synced, memory_order_acquire);
    if ((int32_t)(seen - (uint32_t)step) >= 0) return PLX_OK;
    if (yields + 1 < PLX_LOOKS_OVERSUBSCRIBED) {
      sched_yield();
      continue;
    }
    atomic_fetch_add_explicit(&g->header->sync_sleepers, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&g->header->synced, memory_order_seq_cst) == seen &&
        atomic_load_explicit(&g->header->poison, memory_order_seq_cst) == 0)
      plx_futex_wait(&g->header->synced, seen, plx_slice_ns(w, since));
    atomic_fetch_sub_explicit(&g->header->sync_sleepers, 1, memory_order_relaxed);
    seen = atomic_load_explicit(&g->header->synced, memory_order_acquire);
    if ((int32_t)(seen - (uint32_t)step) >= 0) return PLX_OK;
    /* The rank that should have opened the sync may have died between its arrival and that. */
    if (all_reached(g, step)) return PLX_OK;
    uint32_t late = g->rank;
    for (uint32_t r = 0; r < g->world; r++) {
      if (atomic_load_explicit(&plx_rank_of(g, r)->step, memory_order_acquire) >= step) continue;
      late = r;
      int code = lost(g, w, r, step);
      if (code != PLX_OK) return code;
    }
    int code = plx_check_wait(g, w, late, since);
    if (code != PLX_OK) return code;
  }
}

/* Return whether this rank was the last, and has opened the sync of an oversubscribed group. */
static inline int arrive(struct plx_group *g, uint64_t step) {
  struct plx_rank *me = plx_rank_of(g, g->rank);
  /* This is seq_cst: the store must be seen before we look for sleepers, or both sides would miss each other. */
  atomic_store_explicit(&me->step, step, memory_order_seq_cst);
  if (g->world == 1) return 1;
  if (atomic_load_explicit(&me->sleepers, memory_order_seq_cst) != 0) plx_futex_wake_all(plx_low_half(&me->step));
  if (!g->oversubscribed) return 0;
  if (atomic_fetch_add_explicit(&g->header->arrivals, 1, memory_order_acq_rel) + 1 != step * g->world) return 0;
  atomic_store_explicit(&g->header->synced, (uint32_t)step, memory_order_seq_cst);
  if (atomic_load_explicit(&g->header->sync_sleepers, memory_order_seq_cst) != 0) plx_futex_wake_all(&g->header->synced);
  return 1;
}

int plx_arrive(struct plx_group *g, struct plx_wait *w) {
  int code = plx_poisoned(g, w);
  if (code == PLX_OK) arrive(g, ++g->step);
  return code;
}

int plx_await(struct plx_group *g, struct plx_wait *w, uint64_t step) {
  if (g->world == 1) return PLX_OK;
  return g->oversubscribed ? wait_oversubscribed(g, w, step) : wait_for_each(g, w, step);
}

int plx_sync(struct plx_group *g, struct plx_wait *w) {
  int code = plx_poisoned(g, w);
  if (code != PLX_OK) return code;
  uint64_t step = ++g->step;
  return arrive(g, step) ? PLX_OK : plx_await(g, w, step);
}
