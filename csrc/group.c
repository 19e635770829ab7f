/* Arrive and wait: the one way in which ranks meet, on atomics and futex, with a deadline on every wait. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "attendance.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

uint64_t plx_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

void plx_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* The futex word of a 64-bit counter is its low half. */
_Atomic uint32_t *plx_low_half(_Atomic uint64_t *word) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  return (_Atomic uint32_t *)word + 1;
#else
  return (_Atomic uint32_t *)word;
#endif
}

void plx_futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns) {
  struct timespec t = {(time_t)(timeout_ns / 1000000000ull), (long)(timeout_ns % 1000000000ull)};
  syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT, seen, &t, NULL, 0);
}

void plx_futex_wake_all(_Atomic uint32_t *word) {
  syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
}

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

static size_t rank_stride(size_t stage_bytes) {
  return round_up(sizeof(struct plx_rank), PLX_PAGE) + 3 * round_up(stage_bytes, PLX_PAGE);
}

static size_t channel_stride(size_t channel_bytes) { return round_up(sizeof(struct plx_channel) + channel_bytes, PLX_PAGE); }

size_t plx_group_bytes(uint32_t world, size_t stage_bytes, size_t channel_bytes) {
  if (world == 0 || world > PLX_MAX_WORLD || stage_bytes < PLX_PAGE || channel_bytes < PLX_PAGE ||
      (channel_bytes & (channel_bytes - 1)) != 0)
    return 0;
  return PLX_PAGE + world * rank_stride(stage_bytes) + (size_t)world * world * channel_stride(channel_bytes);
}

int plx_group_format(void *base, uint32_t world, size_t stage_bytes, size_t channel_bytes, int crowded) {
  size_t total = plx_group_bytes(world, stage_bytes, channel_bytes);
  if (total == 0) return PLX_INVALID;
  struct plx_header *h = base;
  h->version = PLX_VERSION;
  h->world = world;
  h->total_bytes = total;
  h->rank_offset = PLX_PAGE;
  h->rank_stride = rank_stride(stage_bytes);
  h->stage_bytes = round_up(stage_bytes, PLX_PAGE);
  h->channel_offset = PLX_PAGE + world * h->rank_stride;
  h->channel_stride = channel_stride(channel_bytes);
  h->channel_bytes = channel_bytes;
  h->crowded = crowded != 0;
  h->magic = PLX_MAGIC;
  return PLX_OK;
}

int plx_group_check(const void *base, size_t bytes) {
  const struct plx_header *h = base;
  if (bytes < PLX_PAGE || h->magic != PLX_MAGIC || h->version != PLX_VERSION || h->total_bytes > bytes) return PLX_INVALID;
  /* Everything else follows from three numbers: who reads from outside is not led astray by a rank that wrote wildly. */
  if (plx_group_bytes(h->world, h->stage_bytes, h->channel_bytes) != h->total_bytes || h->rank_offset != PLX_PAGE ||
      h->rank_stride != rank_stride(h->stage_bytes) || h->channel_offset != PLX_PAGE + h->world * h->rank_stride ||
      h->channel_stride != channel_stride(h->channel_bytes))
    return PLX_INVALID;
  return PLX_OK;
}

struct plx_rank *plx_rank_of(const struct plx_group *g, uint32_t rank) {
  return (struct plx_rank *)(g->base + g->header->rank_offset + rank * g->header->rank_stride);
}

unsigned char *plx_stage_of(const struct plx_group *g, uint32_t rank, uint64_t turn) {
  size_t stage = g->over && rank == g->rank ? 2 : turn & 1;
  return (unsigned char *)plx_rank_of(g, rank) + round_up(sizeof(struct plx_rank), PLX_PAGE) + stage * g->stage_bytes;
}

struct plx_channel *plx_channel_of(const struct plx_group *g, uint32_t src, uint32_t dst) {
  return (struct plx_channel *)(g->base + g->header->channel_offset +
                                ((uint64_t)src * g->world + dst) * g->header->channel_stride);
}

int plx_peer_alive(struct plx_group *g, uint32_t peer) {
  if (peer == g->rank) return 1;
  if (atomic_load_explicit(&plx_rank_of(g, peer)->life, memory_order_acquire) == PLX_LEFT) return 0;
  if (g->pidfds[peer] < 0) return 1;
  struct pollfd p = {g->pidfds[peer], POLLIN, 0};
  return poll(&p, 1, 0) <= 0;
}

int plx_poison(struct plx_group *g, int code, uint32_t rank) {
  uint64_t none = 0, mine = (uint64_t)code | (uint64_t)rank << 8;
  atomic_compare_exchange_strong_explicit(&g->header->poison, &none, mine, memory_order_acq_rel, memory_order_acquire);
  for (uint32_t r = 0; r < g->world; r++) {
    struct plx_rank *peer = plx_rank_of(g, r);
    plx_futex_wake_all(plx_low_half(&peer->step));
    atomic_fetch_add_explicit(&peer->bell, 1, memory_order_release);
    plx_futex_wake_all(&peer->bell);
  }
  plx_futex_wake_all(&g->header->gate);
  return (int)(atomic_load_explicit(&g->header->poison, memory_order_acquire) & 0xff);
}

int plx_poisoned(struct plx_group *g, struct plx_wait *w) {
  uint64_t poison = atomic_load_explicit(&g->header->poison, memory_order_acquire);
  if (poison == 0) return PLX_OK;
  w->culprit = (int32_t)(poison >> 8);
  return (int)(poison & 0xff);
}

/* Whether waiting for `peer` still makes sense. `since_ns` is when this wait began. */
static int look_around(struct plx_group *g, struct plx_wait *w, uint32_t peer, uint64_t since_ns) {
  int code = plx_poisoned(g, w);
  if (code != PLX_OK) return code;
  uint64_t now = plx_now_ns();
  if (now >= w->deadline_ns) {
    w->culprit = (int32_t)peer;
    return plx_poison(g, PLX_DEADLINE, g->rank);
  }
  if (w->idle != NULL && w->idle(w->context, now - since_ns) != 0) {
    w->culprit = (int32_t)g->rank;
    plx_poison(g, PLX_INTERRUPTED, g->rank);
    return PLX_INTERRUPTED;
  }
  return PLX_OK;
}

static uint64_t slice_ns(const struct plx_wait *w) {
  uint64_t now = plx_now_ns();
  if (w->deadline_ns <= now) return 1;
  uint64_t left = w->deadline_ns - now;
  return left < PLX_SLICE_NS ? left : PLX_SLICE_NS;
}

/* A peer that is gone will never reach `step`; but it may have reached it just before it went. */
static int lost(struct plx_group *g, struct plx_wait *w, uint32_t peer, uint64_t step) {
  if (plx_peer_alive(g, peer)) return PLX_OK;
  if (atomic_load_explicit(&plx_rank_of(g, peer)->step, memory_order_acquire) >= step) return PLX_OK;
  w->culprit = (int32_t)peer;
  return plx_poison(g, PLX_PEER_LOST, peer);
}

/* Look at one peer's counter, and sleep only when it takes long; at once where more ranks than cores would look. */
static inline int wait_for_one(struct plx_group *g, struct plx_wait *w, uint32_t peer, uint64_t step, uint64_t *since) {
  struct plx_rank *p = plx_rank_of(g, peer);
  for (uint32_t looks = 1; atomic_load_explicit(&p->step, memory_order_acquire) < step; looks++) {
    uint64_t now;
    if (!g->crowded) {
      plx_relax();
      if (looks % PLX_LOOKS != 0) continue; /* a pause is up to 140 cycles: look at the clock every few microseconds */
      now = plx_now_ns();
      if (*since == 0) *since = now;
      if (now - *since < w->spin_ns) continue;
    } else {
      if (looks < PLX_LOOKS_CROWDED) {
        sched_yield();
        continue;
      }
      if (*since == 0) *since = plx_now_ns();
    }
    /* Announce the sleep first, look again, then sleep: a rank that arrives in between sees the announcement. */
    atomic_fetch_add_explicit(&p->sleepers, 1, memory_order_seq_cst);
    uint64_t seen = atomic_load_explicit(&p->step, memory_order_seq_cst);
    if (seen < step && atomic_load_explicit(&g->header->poison, memory_order_seq_cst) == 0)
      plx_futex_wait(plx_low_half(&p->step), (uint32_t)seen, slice_ns(w));
    atomic_fetch_sub_explicit(&p->sleepers, 1, memory_order_relaxed);
    if (atomic_load_explicit(&p->step, memory_order_acquire) >= step) break;
    int code = lost(g, w, peer, step);
    if (code == PLX_OK) code = look_around(g, w, peer, *since);
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

static int somebody_gone(const struct plx_group *g) {
  return atomic_load_explicit(&g->header->gone, memory_order_seq_cst) != 0;
}

static int all_reached(const struct plx_group *g, uint64_t step) {
  for (uint32_t r = 0; r < g->world; r++)
    if (atomic_load_explicit(&plx_rank_of(g, r)->step, memory_order_seq_cst) < step) return 0;
  return 1;
}

/* More ranks than cores: yield the core a few times to those who still have to arrive, then sleep at the gate. */
static int wait_at_gate(struct plx_group *g, struct plx_wait *w, uint64_t step) {
  uint64_t since = plx_now_ns();
  for (int yields = 0;; yields++) {
    uint32_t seen = atomic_load_explicit(&g->header->gate, memory_order_acquire);
    if ((int32_t)(seen - (uint32_t)step) >= 0) return PLX_OK;
    if (yields + 1 < PLX_LOOKS_CROWDED) {
      sched_yield();
      continue;
    }
    atomic_fetch_add_explicit(&g->header->gate_sleepers, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&g->header->gate, memory_order_seq_cst) == seen &&
        atomic_load_explicit(&g->header->poison, memory_order_seq_cst) == 0)
      plx_futex_wait(&g->header->gate, seen, slice_ns(w));
    atomic_fetch_sub_explicit(&g->header->gate_sleepers, 1, memory_order_relaxed);
    seen = atomic_load_explicit(&g->header->gate, memory_order_acquire);
    if ((int32_t)(seen - (uint32_t)step) >= 0) return PLX_OK;
    /* Who should have opened the gate may have died between its arrival and that; or it left, and arrives no more. */
    if (all_reached(g, step)) return PLX_OK;
    uint32_t late = g->rank;
    for (uint32_t r = 0; r < g->world; r++) {
      if (atomic_load_explicit(&plx_rank_of(g, r)->step, memory_order_acquire) >= step) continue;
      late = r;
      int code = lost(g, w, r, step);
      if (code != PLX_OK) return code;
    }
    int code = look_around(g, w, late, since);
    if (code != PLX_OK) return code;
  }
}

/* Whether this rank was the last, and has opened the gate of a crowded group. */
static inline int arrive(struct plx_group *g, uint64_t step) {
  struct plx_rank *me = plx_rank_of(g, g->rank);
  /* seq_cst: the store must be seen before we look for sleepers, or both sides would miss each other. */
  atomic_store_explicit(&me->step, step, memory_order_seq_cst);
  if (g->world == 1) return 1;
  if (atomic_load_explicit(&me->sleepers, memory_order_seq_cst) != 0) plx_futex_wake_all(plx_low_half(&me->step));
  if (!g->crowded) return 0;
  /* Ranks that left arrive at no gate: then the last of the others finds that all steps are reached. */
  if (atomic_fetch_add_explicit(&g->header->arrivals, 1, memory_order_acq_rel) + 1 != step * g->world &&
      !(somebody_gone(g) && all_reached(g, step)))
    return 0;
  atomic_store_explicit(&g->header->gate, (uint32_t)step, memory_order_seq_cst);
  if (atomic_load_explicit(&g->header->gate_sleepers, memory_order_seq_cst) != 0) plx_futex_wake_all(&g->header->gate);
  return 1;
}

int plx_arrive(struct plx_group *g, struct plx_wait *w) {
  int code = plx_poisoned(g, w);
  if (code == PLX_OK) arrive(g, ++g->step);
  return code;
}

int plx_await(struct plx_group *g, struct plx_wait *w, uint64_t step) {
  if (g->world == 1) return PLX_OK;
  return g->crowded ? wait_at_gate(g, w, step) : wait_for_each(g, w, step);
}

int plx_gate(struct plx_group *g, struct plx_wait *w) {
  int code = plx_poisoned(g, w);
  if (code != PLX_OK) return code;
  uint64_t step = ++g->step;
  return arrive(g, step) ? PLX_OK : plx_await(g, w, step);
}

void plx_issue(struct plx_group *g) { atomic_fetch_add_explicit(&g->issued, 1, memory_order_release); }

void plx_carried_out(struct plx_group *g) { atomic_fetch_add_explicit(&g->carried_out, 1, memory_order_release); }

int plx_is_behind(struct plx_group *g) {
  uint64_t issued = atomic_load_explicit(&g->issued, memory_order_acquire);
  return atomic_load_explicit(&g->carried_out, memory_order_acquire) != issued;
}

void plx_publish(struct plx_group *g, const struct plx_call *call) {
  /* A rank that goes on after a mismatch must not write over the call that slower ranks still compare. */
  if (atomic_load_explicit(&g->header->poison, memory_order_acquire) != 0) return;
  plx_rank_of(g, g->rank)->call[g->turn & 1] = *call;
}

int plx_calls_same(const struct plx_group *g, uint32_t rank, const struct plx_call *mine) {
  const struct plx_call *c = &plx_rank_of(g, rank)->call[g->turn & 1];
  return c->seq == mine->seq && c->count == mine->count && c->digest == mine->digest && c->kind == mine->kind &&
         c->dtype == mine->dtype && c->redop == mine->redop && c->root == mine->root;
}

int plx_agree(struct plx_group *g, const struct plx_call *mine) {
  int code = g->uneven ? plx_roll_call(g, mine) : PLX_OK;
  if (code != PLX_OK) return code;
  for (uint32_t r = 0; r < g->world; r++) {
    if (g->num_gone != 0 && plx_gone(g, r, g->step)) continue;
    if (!plx_calls_same(g, r, mine)) return plx_poison(g, PLX_MISMATCH, g->rank);
  }
  return plx_meet(g, mine);
}
