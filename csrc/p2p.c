/* send and recv; who does what when is in p2p.h.
 *
 * A message is a header of 64 bytes, then its bytes, padded to 64. The sender writes as space comes free, the receiver
 * reads as bytes arrive, so a message may be longer than the ring. Of a channel the sender's side belongs to whoever
 * holds `outlets[dst]`, the receiver's to whoever holds `lock`; that is never held while waiting.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "p2p.h"

#include "recorder.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "staged.h"

struct wire {
  uint64_t bytes;
  uint64_t seq;
  uint32_t tag;
  uint32_t dtype;
};

#define LINE 64u

/* A message that came before its receive, or is coming. */
struct plx_message {
  struct plx_message *next;
  struct wire head;
  unsigned char data[];
};

/* The reading end of a channel. */
struct inlet {
  struct wire head; /* of the message that is being read, if `open` */
  uint64_t at;      /* bytes of it that were read, padding included */
  int open;
  int wanted;                 /* some posted receive could take its next message; written by the driver */
  struct plx_receive *into;   /* where the message goes: to a receive, */
  struct plx_message *shelved; /* or to the shelf */
  struct plx_message *shelf;  /* in the order in which they came */
};

struct plx_mail {
  pthread_mutex_t lock; /* of all but the outlets */
  pthread_cond_t changed; /* the wheel is free, or a receive is over */
  pthread_cond_t work;    /* there is something for the attendant */
  struct plx_receive *posted; /* in the order of posting */
  uint64_t finished; /* receives that are over */
  uint64_t looked_ns;
  int driving, waiting, resting, dismissed;
  struct inlet *inlets;
  pthread_mutex_t *outlets;
};

/* ---- sending ---- */

/* Wait until `dst` has read on from `seen`. */
static int wait_space(struct plx_group *g, struct plx_wait *w, struct plx_channel *c, uint64_t seen, uint32_t dst) {
  uint64_t since = plx_now_ns();
  for (uint32_t spins = 1;; spins++) {
    if (atomic_load_explicit(&c->tail, memory_order_acquire) != seen) return PLX_OK;
    plx_relax();
    if (spins % 256 != 0 && !g->crowded) continue;
    if (!g->crowded && plx_now_ns() - since < w->spin_ns) continue;
    atomic_fetch_add_explicit(&c->tail_sleepers, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&c->tail, memory_order_seq_cst) == seen &&
        atomic_load_explicit(&g->header->poison, memory_order_seq_cst) == 0)
      plx_futex_wait(plx_low_half(&c->tail), (uint32_t)seen, PLX_SLICE_NS);
    atomic_fetch_sub_explicit(&c->tail_sleepers, 1, memory_order_relaxed);
    if (atomic_load_explicit(&c->tail, memory_order_acquire) != seen) return PLX_OK;
    int code = plx_poisoned(g, w);
    if (code != PLX_OK) return code;
    if (!plx_peer_alive(g, dst) && atomic_load_explicit(&c->tail, memory_order_acquire) == seen) {
      w->culprit = (int32_t)dst;
      return plx_poison(g, PLX_PEER_LOST, dst);
    }
    uint64_t now = plx_now_ns();
    if (now >= w->deadline_ns) {
      w->culprit = (int32_t)dst;
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

static size_t padded(size_t n) { return (n + LINE - 1) / LINE * LINE; }

/* Write a message into the channel to `dst`, whose outlet is ours. */
static int put(struct plx_group *g, struct plx_wait *w, uint32_t dst, const struct wire *wire, const void *data) {
  struct plx_channel *c = plx_channel_of(g, g->rank, dst);
  uint64_t size = g->header->channel_bytes, head = atomic_load_explicit(&c->head, memory_order_relaxed);
  size_t n = wire->bytes, end = LINE + padded(n), at = 0; /* of the message, header included */
  while (at < end) {
    uint64_t tail = atomic_load_explicit(&c->tail, memory_order_acquire), space = size - (head - tail);
    if (space == 0) {
      int code = wait_space(g, w, c, tail, dst);
      if (code != PLX_OK) return code;
      continue;
    }
    size_t piece = 0, room = space;
    if (at == 0) { /* the header is one line, and lines never wrap around */
      memcpy(c->data + head % size, wire, sizeof *wire);
      piece = LINE;
      room -= LINE;
    }
    /* Header and first bytes in one go; no more than an eighth of the ring: the receiver reads while we write on. */
    size_t from = at + piece - LINE, to = head + piece;
    size_t more = plx_min(plx_min(room, size - to % size), plx_min(end - at - piece, size / 8));
    if (from < n) plx_copy(c->data + to % size, (const char *)data + from, plx_min(more, n - from));
    head += piece + more;
    at += piece + more;
    atomic_store_explicit(&c->head, head, memory_order_seq_cst);
    ring_bell(g, dst);
  }
  return PLX_OK;
}

/* Messages have no number; a reader of the recorder sees by this one that a line was written over. */
static uint64_t next_seq(const struct plx_group *g) {
  return 1 + atomic_load_explicit(&plx_rank_of(g, g->rank)->next_record, memory_order_relaxed);
}

static struct plx_record *record_send(struct plx_group *g, const struct plx_origin *o, const struct wire *head, uint32_t dst) {
  struct plx_call call = {.seq = next_seq(g), .count = head->bytes, .kind = PLX_SEND, .dtype = (uint8_t)head->dtype,
                          .root = (int32_t)head->tag};
  return plx_record_enter(g, &call, o->site, (int32_t)dst, o->ndim, o->shape);
}

int plx_send(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *data, size_t bytes,
             uint32_t dst, uint32_t tag, int dtype) {
  if (dst >= g->world || dst == g->rank) return PLX_INVALID;
  struct wire head = {bytes, 0, tag, (uint32_t)dtype};
  struct plx_record *record = record_send(g, o, &head, dst);
  int code = plx_poisoned(g, w);
  pthread_mutex_lock(&g->mail->outlets[dst]);
  if (code == PLX_OK) code = put(g, w, dst, &head, data);
  pthread_mutex_unlock(&g->mail->outlets[dst]);
  plx_record_leave(g, record, code);
  return code;
}

int plx_send_now(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *data, size_t bytes,
                 uint32_t dst, uint32_t tag, int dtype) {
  if (dst >= g->world || dst == g->rank) return PLX_INVALID;
  if (LINE + padded(bytes) > g->header->channel_bytes) return PLX_WOULD_WAIT;
  if (pthread_mutex_trylock(&g->mail->outlets[dst]) != 0) return PLX_WOULD_WAIT;
  struct plx_channel *c = plx_channel_of(g, g->rank, dst);
  uint64_t used = atomic_load_explicit(&c->head, memory_order_relaxed) - atomic_load_explicit(&c->tail, memory_order_acquire);
  int code = PLX_WOULD_WAIT;
  if (LINE + padded(bytes) <= g->header->channel_bytes - used) {
    struct wire head = {bytes, 0, tag, (uint32_t)dtype};
    struct plx_record *record = record_send(g, o, &head, dst);
    code = plx_poisoned(g, w);
    if (code == PLX_OK) code = put(g, w, dst, &head, data);
    plx_record_leave(g, record, code);
  }
  pthread_mutex_unlock(&g->mail->outlets[dst]);
  return code;
}

/* ---- receiving: all of this under the lock ---- */

/* A receive may be posted for long. The recorder is a ring: by now its line may tell of another operation. */
static struct plx_record *record_of(struct plx_group *g, const struct plx_receive *r) {
  return plx_record_is_kept(g, r->recorded) ? r->record : NULL;
}

static void finish(struct plx_group *g, struct plx_receive *r, int code, int recorded_code) {
  struct plx_receive **at = &g->mail->posted;
  while (*at != NULL && *at != r) at = &(*at)->next;
  if (*at != NULL) *at = r->next;
  struct plx_record *record = record_of(g, r);
  if (record != NULL) plx_record_leave(g, record, recorded_code);
  g->mail->finished++;
  atomic_store_explicit(&r->status, code, memory_order_release);
  if (g->mail->waiting != 0) pthread_cond_broadcast(&g->mail->changed);
}

/* The group is over, and with it every posted receive. `culprit`, if any, is the one that did not fit. */
static int finish_all(struct plx_group *g, int code, const struct plx_receive *culprit) {
  for (uint32_t r = 0; r < g->world; r++) g->mail->inlets[r].into = NULL;
  while (g->mail->posted != NULL) {
    struct plx_receive *r = g->mail->posted;
    finish(g, r, code, culprit == NULL || r == culprit ? code : PLX_INTERRUPTED);
  }
  return code;
}

static int has_bytes(struct plx_group *g, uint32_t src) {
  struct plx_channel *c = plx_channel_of(g, src, g->rank);
  return atomic_load_explicit(&c->head, memory_order_seq_cst) != atomic_load_explicit(&c->tail, memory_order_relaxed);
}

static int is_fit(const struct wire *head, const struct plx_receive *r) {
  return head->bytes == r->bytes && head->dtype == r->dtype;
}

static void match(struct plx_group *g, struct plx_receive *r, uint32_t src) {
  struct plx_record *record = record_of(g, r);
  if (record != NULL) __atomic_store_n(&record->peer, (int32_t)src, __ATOMIC_RELAXED);
  r->from = src;
  r->matched = 1;
}

/* A message begins: where will it go? */
static int begin(struct plx_group *g, uint32_t src, const struct wire *head) {
  struct inlet *in = &g->mail->inlets[src];
  struct plx_receive *r = g->mail->posted;
  while (r != NULL && (r->matched || r->tag != head->tag || (r->src >= 0 && r->src != (int32_t)src))) r = r->next;
  if (r != NULL) {
    match(g, r, src);
    if (!is_fit(head, r)) return finish_all(g, plx_poison(g, PLX_MISMATCH, g->rank), r);
  } else {
    struct plx_message *m = malloc(sizeof *m + head->bytes);
    if (m == NULL) return finish_all(g, plx_poison(g, PLX_NO_MEMORY, g->rank), NULL);
    m->next = NULL;
    m->head = *head;
    struct plx_message **end = &in->shelf;
    while (*end != NULL) end = &(*end)->next;
    *end = in->shelved = m;
  }
  in->into = r;
  in->head = *head;
  in->at = 0;
  in->open = 1;
  return PLX_OK;
}

/* Take one piece out of the channel from `src`, if one is there; whether there was. */
static int advance(struct plx_group *g, uint32_t src) {
  struct inlet *in = &g->mail->inlets[src];
  struct plx_channel *c = plx_channel_of(g, src, g->rank);
  uint64_t size = g->header->channel_bytes, tail = atomic_load_explicit(&c->tail, memory_order_relaxed);
  uint64_t head = atomic_load_explicit(&c->head, memory_order_acquire);
  if (head == tail) return 0;
  if (!in->open) {
    struct wire wire;
    memcpy(&wire, c->data + tail % size, sizeof wire);
    if (begin(g, src, &wire) != PLX_OK) return 1;
    tail += LINE;
  }
  uint64_t end = padded(in->head.bytes), n = in->head.bytes;
  size_t piece = plx_min(plx_min(head - tail, size - tail % size), plx_min(end - in->at, size / 8));
  char *to = in->into != NULL ? in->into->data : in->shelved != NULL ? (char *)in->shelved->data : NULL;
  if (in->at < n && to != NULL) plx_copy(to + in->at, c->data + tail % size, plx_min(piece, n - in->at));
  tail += piece;
  in->at += piece;
  atomic_store_explicit(&c->tail, tail, memory_order_seq_cst);
  if (atomic_load_explicit(&c->tail_sleepers, memory_order_seq_cst) != 0) plx_futex_wake_all(plx_low_half(&c->tail));
  if (in->at == end) {
    struct plx_receive *r = in->into;
    in->open = 0;
    in->into = NULL;
    in->shelved = NULL;
    if (r != NULL) finish(g, r, PLX_OK, PLX_OK);
  }
  return 1;
}

static int is_wanted(const struct plx_mail *mail, uint32_t src) {
  if (mail->posted != NULL && mail->inlets[src].open) return 1;
  for (const struct plx_receive *r = mail->posted; r != NULL; r = r->next)
    if (!r->matched && (r->src < 0 || r->src == (int32_t)src)) return 1;
  return 0;
}

/* Take in one piece of every channel that somebody wants something from; whether there was any. */
static int take_in(struct plx_group *g) {
  int moved = 0;
  for (uint32_t r = 0; r < g->world; r++) {
    if (r == g->rank) continue;
    g->mail->inlets[r].wanted = is_wanted(g->mail, r);
    if (g->mail->inlets[r].wanted) moved |= advance(g, r);
  }
  return moved;
}

/* Give `r` what lies on the shelf for it, whole or begun. */
static void take_from_shelf(struct plx_group *g, struct plx_receive *r, uint32_t src) {
  struct inlet *in = &g->mail->inlets[src];
  struct plx_message **at = &in->shelf;
  while (*at != NULL && (*at)->head.tag != r->tag) at = &(*at)->next;
  struct plx_message *m = *at;
  if (m == NULL) return;
  match(g, r, src);
  if (!is_fit(&m->head, r)) {
    finish_all(g, plx_poison(g, PLX_MISMATCH, g->rank), r);
    return;
  }
  *at = m->next;
  plx_copy(r->data, m->data, m == in->shelved ? plx_min(in->at, r->bytes) : r->bytes);
  if (m == in->shelved) {
    in->shelved = NULL;
    in->into = r;
  } else {
    finish(g, r, PLX_OK, PLX_OK);
  }
  free(m);
}

/* Whether nobody who could still send for `r` lives, and all that they sent has been read. */
static int is_hopeless(struct plx_group *g, const struct plx_receive *r, uint32_t *culprit) {
  for (uint32_t p = 0; p < g->world; p++) {
    if (p == g->rank || (r->matched ? p != r->from : r->src >= 0 && p != (uint32_t)r->src)) continue;
    if (plx_peer_alive(g, p) || has_bytes(g, p)) return 0;
    *culprit = p;
  }
  return 1;
}

/* Whether waiting still makes sense; if not, all receives are over. */
static int look_around(struct plx_group *g, struct plx_wait *w) {
  uint64_t now = g->mail->looked_ns = plx_now_ns();
  int code = plx_poisoned(g, w);
  for (struct plx_receive *r = g->mail->posted; r != NULL && code == PLX_OK; r = r->next) {
    uint32_t culprit = g->rank;
    if (is_hopeless(g, r, &culprit)) code = plx_poison(g, PLX_PEER_LOST, culprit);
    else if (now >= r->deadline_ns) code = plx_poison(g, PLX_DEADLINE, g->rank);
  }
  return code == PLX_OK ? PLX_OK : finish_all(g, code, NULL);
}

/* ---- who takes in when ---- */

/* Make the driver look again. */
static void nudge(struct plx_group *g) {
  struct plx_rank *me = plx_rank_of(g, g->rank);
  atomic_fetch_add_explicit(&me->bell, 1, memory_order_seq_cst);
  if (atomic_load_explicit(&me->bell_sleepers, memory_order_seq_cst) != 0) plx_futex_wake_all(&me->bell);
}

static int has_arrival(struct plx_group *g) {
  for (uint32_t r = 0; r < g->world; r++)
    if (r != g->rank && g->mail->inlets[r].wanted && has_bytes(g, r)) return 1;
  return 0;
}

/* Without the lock: wait for bytes or for the bell to move from `bell`, at most one slice. Whether that came. */
static int await_arrival(struct plx_group *g, struct plx_wait *w, uint32_t bell) {
  struct plx_rank *me = plx_rank_of(g, g->rank);
  uint64_t since = plx_now_ns();
  for (uint32_t spins = 1; !g->crowded; spins++) {
    if (has_arrival(g) || atomic_load_explicit(&me->bell, memory_order_acquire) != bell) return 1;
    plx_relax();
    if (spins % 64 == 0 && plx_now_ns() - since >= w->spin_ns) break;
  }
  atomic_fetch_add_explicit(&me->bell_sleepers, 1, memory_order_seq_cst);
  if (!has_arrival(g) && atomic_load_explicit(&g->header->poison, memory_order_seq_cst) == 0)
    plx_futex_wait(&me->bell, bell, PLX_SLICE_NS);
  atomic_fetch_sub_explicit(&me->bell_sleepers, 1, memory_order_relaxed);
  return has_arrival(g);
}

/* At the wheel for one turn: take in what is there, else wait for more. The lock is let go meanwhile. */
static int turn(struct plx_group *g, struct plx_wait *w, uint64_t since_ns) {
  struct plx_mail *mail = g->mail;
  /* Before we look: a receive posted from here on moves the bell. */
  uint32_t bell = atomic_load_explicit(&plx_rank_of(g, g->rank)->bell, memory_order_seq_cst);
  mail->driving = 1;
  int moved = take_in(g), gave_up = 0;
  if (!moved) {
    pthread_mutex_unlock(&mail->lock);
    moved = await_arrival(g, w, bell);
    pthread_mutex_lock(&mail->lock);
  }
  mail->driving = 0; /* before we ask: a signal handler may receive, too, and then drives itself */
  if (!moved && w->idle != NULL) {
    pthread_mutex_unlock(&mail->lock);
    gave_up = w->idle(w->context, plx_now_ns() - since_ns) != 0;
    pthread_mutex_lock(&mail->lock);
  }
  if (gave_up) {
    w->culprit = (int32_t)g->rank;
    plx_poison(g, PLX_INTERRUPTED, g->rank);
    finish_all(g, PLX_INTERRUPTED, NULL);
    return PLX_INTERRUPTED;
  }
  return moved && plx_now_ns() - mail->looked_ns < PLX_SLICE_NS ? PLX_OK : look_around(g, w);
}

static void sleep_on(pthread_cond_t *condition, pthread_mutex_t *lock, uint64_t ns) {
  uint64_t until = plx_now_ns() + ns;
  struct timespec t = {(time_t)(until / 1000000000ull), (long)(until % 1000000000ull)};
  pthread_cond_timedwait(condition, lock, &t);
}

/* Another thread drives: sleep until it has something for us, or the wheel is free. */
static int stand_by(struct plx_group *g, struct plx_wait *w, uint64_t since_ns) {
  sleep_on(&g->mail->changed, &g->mail->lock, PLX_SLICE_NS);
  if (w->idle == NULL || plx_now_ns() - since_ns < PLX_SLICE_NS) return PLX_OK;
  pthread_mutex_unlock(&g->mail->lock);
  int gave_up = w->idle(w->context, plx_now_ns() - since_ns) != 0;
  pthread_mutex_lock(&g->mail->lock);
  if (!gave_up) return PLX_OK;
  w->culprit = (int32_t)g->rank;
  plx_poison(g, PLX_INTERRUPTED, g->rank);
  finish_all(g, PLX_INTERRUPTED, NULL);
  return PLX_INTERRUPTED;
}

int plx_post(struct plx_group *g, const struct plx_origin *o, struct plx_receive *r) {
  if (r->src >= (int32_t)g->world || r->src == (int32_t)g->rank) return PLX_INVALID;
  struct plx_mail *mail = g->mail;
  struct plx_call call = {.seq = next_seq(g), .count = r->bytes, .kind = PLX_RECV, .dtype = (uint8_t)r->dtype,
                          .root = (int32_t)r->tag};
  r->record = plx_record_enter(g, &call, o->site, r->src, o->ndim, o->shape);
  r->recorded = atomic_load_explicit(&plx_rank_of(g, g->rank)->next_record, memory_order_relaxed);
  r->next = NULL;
  r->matched = 0;
  atomic_store_explicit(&r->status, PLX_PENDING, memory_order_relaxed);
  struct plx_wait now = {.culprit = -1};
  pthread_mutex_lock(&mail->lock);
  struct plx_receive **end = &mail->posted;
  while (*end != NULL) end = &(*end)->next;
  *end = r;
  int code = plx_poisoned(g, &now);
  if (code != PLX_OK) finish_all(g, code, NULL);
  for (uint32_t p = 0; p < g->world && !r->matched && code == PLX_OK; p++)
    if (p != g->rank && (r->src < 0 || r->src == (int32_t)p)) take_from_shelf(g, r, p);
  if (!mail->driving) {
    while (atomic_load_explicit(&r->status, memory_order_relaxed) == PLX_PENDING && take_in(g)) continue;
  } else {
    nudge(g);
  }
  code = atomic_load_explicit(&r->status, memory_order_relaxed);
  if (code == PLX_PENDING && mail->resting && mail->waiting == 0) pthread_cond_signal(&mail->work);
  pthread_mutex_unlock(&mail->lock);
  return code;
}

int plx_drive(struct plx_group *g, struct plx_wait *w, struct plx_receive *r) {
  struct plx_mail *mail = g->mail;
  uint64_t since = plx_now_ns();
  int code = PLX_OK;
  pthread_mutex_lock(&mail->lock);
  uint64_t finished = mail->finished;
  if (mail->driving && mail->waiting == 0) nudge(g); /* the attendant makes room */
  mail->waiting++;
  while (atomic_load_explicit(&r->status, memory_order_relaxed) == PLX_PENDING && mail->finished == finished &&
         code == PLX_OK && plx_now_ns() < w->deadline_ns)
    code = mail->driving ? stand_by(g, w, since) : turn(g, w, since);
  mail->waiting--;
  if (mail->waiting != 0) pthread_cond_broadcast(&mail->changed);
  else if (mail->posted != NULL && mail->resting) pthread_cond_signal(&mail->work);
  pthread_mutex_unlock(&mail->lock);
  return code;
}

void plx_glance(struct plx_group *g) {
  pthread_mutex_lock(&g->mail->lock);
  if (!g->mail->driving) take_in(g);
  pthread_mutex_unlock(&g->mail->lock);
}

#define DOZE_NS 500000ull /* a receive that is waited for at once never meets the attendant */

void plx_attend(struct plx_group *g) {
  struct plx_mail *mail = g->mail;
  struct plx_wait w = {.deadline_ns = UINT64_MAX, .spin_ns = 0, .culprit = -1};
  int dozed = 0, ended = 0;
  pthread_mutex_lock(&mail->lock);
  while (!mail->dismissed && !ended) {
    if (mail->posted == NULL || mail->waiting != 0 || mail->driving) {
      mail->resting = 1;
      pthread_cond_wait(&mail->work, &mail->lock);
      mail->resting = dozed = 0;
    } else if (!dozed) {
      sleep_on(&mail->work, &mail->lock, DOZE_NS);
      dozed = 1;
    } else {
      uint64_t before = mail->finished;
      turn(g, &w, 0);
      ended = mail->finished != before;
      if (mail->waiting != 0) pthread_cond_broadcast(&mail->changed);
    }
  }
  pthread_mutex_unlock(&mail->lock);
}

void plx_mail_end(struct plx_group *g) {
  pthread_mutex_lock(&g->mail->lock);
  g->mail->dismissed = 1;
  finish_all(g, PLX_CLOSED, NULL);
  pthread_cond_broadcast(&g->mail->work);
  pthread_cond_broadcast(&g->mail->changed);
  pthread_mutex_unlock(&g->mail->lock);
}

void plx_dismiss(struct plx_group *g) {
  pthread_mutex_lock(&g->mail->lock);
  g->mail->dismissed = 1;
  pthread_cond_signal(&g->mail->work);
  nudge(g);
  pthread_mutex_unlock(&g->mail->lock);
}

/* ---- the memory of it ---- */

struct plx_mail *plx_mail_open(uint32_t world) {
  struct plx_mail *mail = calloc(1, sizeof *mail);
  if (mail == NULL) return NULL;
  mail->inlets = calloc(world, sizeof *mail->inlets);
  mail->outlets = calloc(world, sizeof *mail->outlets);
  if (mail->inlets == NULL || mail->outlets == NULL) {
    free(mail->inlets);
    free(mail->outlets);
    free(mail);
    return NULL;
  }
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_mutex_init(&mail->lock, NULL);
  pthread_cond_init(&mail->changed, &monotonic);
  pthread_cond_init(&mail->work, &monotonic);
  for (uint32_t r = 0; r < world; r++) pthread_mutex_init(&mail->outlets[r], NULL);
  pthread_condattr_destroy(&monotonic);
  return mail;
}

/* Locks and conditions hold no resources here, and in a forked child they may be held by threads that do not exist. */
void plx_mail_close(struct plx_mail *mail, uint32_t world) {
  if (mail == NULL) return;
  for (uint32_t r = 0; r < world; r++)
    while (mail->inlets[r].shelf != NULL) {
      struct plx_message *m = mail->inlets[r].shelf;
      mail->inlets[r].shelf = m->next;
      free(m);
    }
  free(mail->inlets);
  free(mail->outlets);
  free(mail);
}
