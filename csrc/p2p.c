/* send and recv: a ring of bytes for each ordered pair of ranks, and a shelf for messages that come before their receive.
 *
 * A message is a header of 64 bytes, then its bytes, padded to 64. The sender writes as space comes free, the receiver
 * reads as bytes arrive, so a message may be longer than the ring. One thread at a time may use a side of a channel.
 */
#include <stdlib.h>

#include "staged.h"

struct wire {
  uint64_t bytes;
  uint64_t seq;
  uint32_t tag;
  uint32_t dtype;
};

struct plx_message {
  struct plx_message *next;
  struct wire head;
  unsigned char data[];
};

#define LINE 64u

/* Wait until `*word` of a channel moves from `seen`. The other end is `peer`. */
static int wait_move(struct plx_group *g, struct plx_wait *w, _Atomic uint64_t *word, _Atomic uint32_t *sleepers,
                     uint64_t seen, uint32_t peer) {
  uint64_t since = plx_now_ns();
  for (uint32_t spins = 1;; spins++) {
    if (atomic_load_explicit(word, memory_order_acquire) != seen) return PLX_OK;
    plx_relax();
    if (spins % 256 != 0 && !g->crowded) continue;
    if (!g->crowded && plx_now_ns() - since < w->spin_ns) continue;
    atomic_fetch_add_explicit(sleepers, 1, memory_order_seq_cst);
    if (atomic_load_explicit(word, memory_order_seq_cst) == seen &&
        atomic_load_explicit(&g->header->poison, memory_order_seq_cst) == 0)
      plx_futex_wait(plx_low_half(word), (uint32_t)seen, PLX_SLICE_NS);
    atomic_fetch_sub_explicit(sleepers, 1, memory_order_relaxed);
    if (atomic_load_explicit(word, memory_order_acquire) != seen) return PLX_OK;
    int code = plx_poisoned(g, w);
    if (code != PLX_OK) return code;
    if (!plx_peer_alive(g, peer) && atomic_load_explicit(word, memory_order_acquire) == seen) {
      w->culprit = (int32_t)peer;
      return plx_poison(g, PLX_PEER_LOST, peer);
    }
    uint64_t now = plx_now_ns();
    if (now >= w->deadline_ns) {
      w->culprit = (int32_t)peer;
      return plx_poison(g, PLX_DEADLINE, g->rank);
    }
    if (w->idle != NULL && w->idle(w->context, now - since) != 0) {
      w->culprit = (int32_t)g->rank;
      plx_poison(g, PLX_INTERRUPTED, g->rank);
      return PLX_INTERRUPTED;
    }
  }
}

static void ring_bell(struct plx_group *g, uint32_t rank) {
  struct plx_rank *r = plx_rank_of(g, rank);
  if (atomic_load_explicit(&r->bell_sleepers, memory_order_seq_cst) == 0) return;
  atomic_fetch_add_explicit(&r->bell, 1, memory_order_seq_cst);
  plx_futex_wake_all(&r->bell);
}

/* Write `n` bytes, padded to a line, into the channel to `dst`. */
static int put(struct plx_group *g, struct plx_wait *w, uint32_t dst, const void *data, size_t n) {
  struct plx_channel *c = plx_channel_of(g, g->rank, dst);
  uint64_t size = g->header->channel_bytes, head = atomic_load_explicit(&c->head, memory_order_relaxed);
  size_t padded = (n + LINE - 1) / LINE * LINE, at = 0;
  while (at < padded) {
    uint64_t tail = atomic_load_explicit(&c->tail, memory_order_acquire);
    uint64_t space = size - (head - tail);
    if (space == 0) {
      int code = wait_move(g, w, &c->tail, &c->tail_sleepers, tail, dst);
      if (code != PLX_OK) return code;
      continue;
    }
    /* No more than a quarter of the ring at a time: the receiver starts to read while we write on. */
    size_t piece = plx_min(plx_min(space, size - head % size), plx_min(padded - at, size / 4));
    if (at < n) plx_copy(c->data + head % size, (const char *)data + at, plx_min(piece, n - at));
    head += piece;
    at += piece;
    atomic_store_explicit(&c->head, head, memory_order_seq_cst);
    if (atomic_load_explicit(&c->head_sleepers, memory_order_seq_cst) != 0) plx_futex_wake_all(plx_low_half(&c->head));
    ring_bell(g, dst);
  }
  return PLX_OK;
}

/* Read `n` bytes, padded to a line, from the channel from `src`; NULL throws them away. */
static int take(struct plx_group *g, struct plx_wait *w, uint32_t src, void *data, size_t n) {
  struct plx_channel *c = plx_channel_of(g, src, g->rank);
  uint64_t size = g->header->channel_bytes, tail = atomic_load_explicit(&c->tail, memory_order_relaxed);
  size_t padded = (n + LINE - 1) / LINE * LINE, at = 0;
  while (at < padded) {
    uint64_t head = atomic_load_explicit(&c->head, memory_order_acquire);
    if (head == tail) {
      int code = wait_move(g, w, &c->head, &c->head_sleepers, head, src);
      if (code != PLX_OK) return code;
      continue;
    }
    size_t piece = plx_min(plx_min(head - tail, size - tail % size), plx_min(padded - at, size / 4));
    if (at < n && data != NULL) plx_copy((char *)data + at, c->data + tail % size, plx_min(piece, n - at));
    tail += piece;
    at += piece;
    atomic_store_explicit(&c->tail, tail, memory_order_seq_cst);
    if (atomic_load_explicit(&c->tail_sleepers, memory_order_seq_cst) != 0) plx_futex_wake_all(plx_low_half(&c->tail));
  }
  return PLX_OK;
}

int plx_send(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *data, size_t bytes,
             uint32_t dst, uint32_t tag, int dtype) {
  if (dst >= g->world || dst == g->rank) return PLX_INVALID;
  struct plx_call call = {.seq = 1, .count = bytes, .kind = PLX_SEND, .dtype = (uint8_t)dtype, .root = (int32_t)tag};
  struct plx_record *record = plx_record_enter(g, &call, o->site, (int32_t)dst, o->ndim, o->shape);
  struct wire head = {bytes, 0, tag, (uint32_t)dtype};
  int code = plx_poisoned(g, w);
  if (code == PLX_OK) code = put(g, w, dst, &head, sizeof head);
  if (code == PLX_OK) code = put(g, w, dst, data, bytes);
  plx_record_leave(record, code);
  return code;
}

/* Whether a message from `src` with `tag` lies on the shelf. */
static struct plx_message **find_early(struct plx_group *g, uint32_t src, uint32_t tag) {
  for (struct plx_message **m = &g->early[src]; *m != NULL; m = &(*m)->next)
    if ((*m)->head.tag == tag) return m;
  return NULL;
}

/* Take the next message of a channel whole and put it on the shelf, last. */
static int shelve(struct plx_group *g, struct plx_wait *w, uint32_t src, const struct wire *head) {
  struct plx_message *m = malloc(sizeof *m + head->bytes);
  if (m == NULL) return plx_poison(g, PLX_NO_MEMORY, g->rank);
  m->next = NULL;
  m->head = *head;
  int code = take(g, w, src, m->data, head->bytes);
  if (code != PLX_OK) {
    free(m);
    return code;
  }
  struct plx_message **end = &g->early[src];
  while (*end != NULL) end = &(*end)->next;
  *end = m;
  return PLX_OK;
}

static int recv_from(struct plx_group *g, struct plx_wait *w, void *data, size_t bytes, uint32_t src, uint32_t tag,
                     int dtype) {
  struct plx_message **early = find_early(g, src, tag);
  if (early != NULL) {
    struct plx_message *m = *early;
    *early = m->next;
    int fits = m->head.bytes == bytes && m->head.dtype == (uint32_t)dtype;
    if (fits) plx_copy(data, m->data, bytes);
    free(m);
    return fits ? PLX_OK : plx_poison(g, PLX_MISMATCH, g->rank);
  }
  for (;;) {
    struct wire head;
    int code = take(g, w, src, &head, sizeof head);
    if (code != PLX_OK) return code;
    if (head.tag != tag) {
      code = shelve(g, w, src, &head);
      if (code != PLX_OK) return code;
      continue;
    }
    if (head.bytes != bytes || head.dtype != (uint32_t)dtype) return plx_poison(g, PLX_MISMATCH, g->rank);
    return take(g, w, src, data, bytes);
  }
}

/* Wait until some channel has a message with `tag`; shelves what comes with other tags. */
static int await_any(struct plx_group *g, struct plx_wait *w, uint32_t tag, uint32_t *src) {
  struct plx_rank *me = plx_rank_of(g, g->rank);
  uint64_t since = plx_now_ns();
  for (uint32_t looks = 1;; looks++) {
    uint32_t bell = atomic_load_explicit(&me->bell, memory_order_seq_cst);
    int asleep = looks % 64 == 0 || g->crowded;
    if (asleep) atomic_fetch_add_explicit(&me->bell_sleepers, 1, memory_order_seq_cst);
    int code = PLX_OK, found = 0, alive = 0;
    for (uint32_t r = 0; r < g->world && !found && code == PLX_OK; r++) {
      if (r == g->rank) continue;
      struct plx_channel *c = plx_channel_of(g, r, g->rank);
      while (code == PLX_OK && !found) {
        if (find_early(g, r, tag) != NULL) {
          *src = r;
          found = 1;
        } else if (atomic_load_explicit(&c->head, memory_order_seq_cst) !=
                   atomic_load_explicit(&c->tail, memory_order_relaxed)) {
          struct wire head;
          code = take(g, w, r, &head, sizeof head);
          if (code == PLX_OK) code = shelve(g, w, r, &head);
        } else {
          break;
        }
      }
      alive += asleep ? plx_peer_alive(g, r) : 1;
      w->culprit = (int32_t)r;
    }
    if (asleep && !found && code == PLX_OK && atomic_load_explicit(&g->header->poison, memory_order_seq_cst) == 0 &&
        plx_now_ns() - since > w->spin_ns)
      plx_futex_wait(&me->bell, bell, PLX_SLICE_NS);
    if (asleep) atomic_fetch_sub_explicit(&me->bell_sleepers, 1, memory_order_relaxed);
    if (found || code != PLX_OK) return code;
    if (!asleep) {
      plx_relax();
      continue;
    }
    code = plx_poisoned(g, w);
    if (code == PLX_OK && alive == 0) code = plx_poison(g, PLX_PEER_LOST, (uint32_t)w->culprit);
    uint64_t now = plx_now_ns();
    if (code == PLX_OK && now >= w->deadline_ns) code = plx_poison(g, PLX_DEADLINE, g->rank);
    if (code != PLX_OK) return code;
    if (w->idle != NULL && w->idle(w->context, now - since) != 0) {
      plx_poison(g, PLX_INTERRUPTED, g->rank);
      return PLX_INTERRUPTED;
    }
  }
}

int plx_recv(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, void *data, size_t bytes, int32_t src,
             uint32_t tag, int dtype, uint32_t *from) {
  if (src >= (int32_t)g->world || src == (int32_t)g->rank) return PLX_INVALID;
  struct plx_call call = {.seq = 1, .count = bytes, .kind = PLX_RECV, .dtype = (uint8_t)dtype, .root = (int32_t)tag};
  struct plx_record *record = plx_record_enter(g, &call, o->site, src, o->ndim, o->shape);
  int code = plx_poisoned(g, w);
  if (code == PLX_OK && src < 0) {
    uint32_t found = 0;
    code = await_any(g, w, tag, &found);
    src = (int32_t)found;
  }
  if (code == PLX_OK) code = recv_from(g, w, data, bytes, (uint32_t)src, tag, dtype);
  if (from != NULL) *from = (uint32_t)src;
  plx_record_leave(record, code);
  return code;
}

void plx_drop_early(struct plx_group *g) {
  for (uint32_t r = 0; r < g->world; r++)
    while (g->early[r] != NULL) {
      struct plx_message *m = g->early[r];
      g->early[r] = m->next;
      free(m);
    }
}
