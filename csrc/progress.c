/* This file decides which thread takes in messages, and when; the contract is in p2p.h. */
#include <stdlib.h>
#include <time.h>

#include "futex.h"
#include "mailbox.h"
#include "recorder.h"

/* Make the thread that makes progress look again. */
static void nudge(struct plx_group *g) {
  struct plx_rank *me = plx_rank_of(g, g->rank);
  atomic_fetch_add_explicit(&me->bell, 1, memory_order_seq_cst);
  if (atomic_load_explicit(&me->bell_sleepers, memory_order_seq_cst) != 0) plx_futex_wake_all(&me->bell);
}

static int has_arrival(struct plx_group *g) {
  for (uint32_t r = 0; r < g->world; r++)
    if (r != g->rank && g->mailbox->recv_channels[r].wanted && plx_has_bytes(g, r)) return 1;
  return 0;
}

/* Wait, without the lock, for bytes or for the bell to move from `bell`, at most one slice. Return whether that came. */
static int await_arrival(struct plx_group *g, struct plx_wait *w, uint32_t bell, uint64_t since_ns) {
  struct plx_rank *me = plx_rank_of(g, g->rank);
  uint64_t since = plx_now_ns();
  for (uint32_t spins = 1; !g->oversubscribed; spins++) {
    if (has_arrival(g) || atomic_load_explicit(&me->bell, memory_order_acquire) != bell) return 1;
    plx_relax();
    if (spins % 64 == 0 && plx_now_ns() - since >= w->spin_ns) break;
  }
  atomic_fetch_add_explicit(&me->bell_sleepers, 1, memory_order_seq_cst);
  if (!has_arrival(g) && atomic_load_explicit(&g->header->poison, memory_order_seq_cst) == 0)
    plx_futex_wait(&me->bell, bell, plx_slice_ns(w, since_ns));
  atomic_fetch_sub_explicit(&me->bell_sleepers, 1, memory_order_relaxed);
  return has_arrival(g);
}

/* Return whether the caller wants to go on waiting; it is asked without the lock. */
static int ask(struct plx_group *g, struct plx_wait *w, uint64_t since_ns) {
  if (w->idle == NULL) return PLX_OK;
  pthread_mutex_unlock(&g->mailbox->lock);
  int code = plx_ask_caller(g, w, since_ns);
  pthread_mutex_lock(&g->mailbox->lock);
  return code == PLX_OK ? PLX_OK : plx_finish_all(g, code, NULL);
}

/* Make progress once: take in what is there, else wait for more. The lock is let go meanwhile. */
static int progress_once(struct plx_group *g, struct plx_wait *w, uint64_t since_ns) {
  struct plx_mailbox *mailbox = g->mailbox;
  /* This is read before we look: a receive posted from here on moves the bell. */
  uint32_t bell = atomic_load_explicit(&plx_rank_of(g, g->rank)->bell, memory_order_seq_cst);
  mailbox->progressing = 1;
  int moved = plx_take_in(g), code = PLX_OK;
  if (!moved) {
    pthread_mutex_unlock(&mailbox->lock);
    moved = await_arrival(g, w, bell, since_ns);
    pthread_mutex_lock(&mailbox->lock);
  }
  mailbox->progressing = 0; /* before we ask: a signal handler may receive, too, and then makes progress itself */
  if (!moved && plx_now_ns() - since_ns >= PLX_SLICE_NS) code = ask(g, w, since_ns);
  if (code != PLX_OK) return code;
  return moved && plx_now_ns() - mailbox->looked_ns < PLX_SLICE_NS ? PLX_OK : plx_check_receives(g, w);
}

static void sleep_on(pthread_cond_t *condition, pthread_mutex_t *lock, uint64_t ns) {
  uint64_t until = plx_now_ns() + ns;
  struct timespec t = {(time_t)(until / 1000000000ull), (long)(until % 1000000000ull)};
  pthread_cond_timedwait(condition, lock, &t);
}

/* Another thread makes progress: sleep until it has something for us, or makes none any more. */
static int stand_by(struct plx_group *g, struct plx_wait *w, uint64_t since_ns) {
  sleep_on(&g->mailbox->changed, &g->mailbox->lock, PLX_SLICE_NS);
  return plx_now_ns() - since_ns < PLX_SLICE_NS ? PLX_OK : ask(g, w, since_ns);
}

int plx_post(struct plx_group *g, const struct plx_origin *o, struct plx_receive *r) {
  if (r->src >= (int32_t)g->world || r->src == (int32_t)g->rank) return PLX_INVALID;
  struct plx_mailbox *mailbox = g->mailbox;
  struct plx_call call = {.seq = plx_next_record(g), .count = r->bytes, .kind = PLX_RECV, .dtype = (uint8_t)r->dtype,
                          .root = (int32_t)r->tag};
  r->record = plx_record_enter(g, &call, o, r->src);
  r->recorded = atomic_load_explicit(&plx_rank_of(g, g->rank)->next_record, memory_order_relaxed);
  r->next = NULL;
  r->matched = 0;
  int handed_over = r->handed_over;
  r->handed_over = 0; /* what ends here, our caller hears from us */
  atomic_store_explicit(&r->status, PLX_PENDING, memory_order_relaxed);
  struct plx_wait now = {.failed_rank = -1};
  pthread_mutex_lock(&mailbox->lock);
  r->before = mailbox->last_posted;
  *(r->before != NULL ? &r->before->next : &mailbox->posted) = r;
  mailbox->last_posted = r;
  if (mailbox->posted == r || r->deadline_ns < mailbox->deadline_ns) mailbox->deadline_ns = r->deadline_ns;
  plx_count_unmatched(mailbox, r, 1);
  int code = plx_poisoned(g, &now);
  if (code != PLX_OK) plx_finish_all(g, code, NULL);
  for (uint32_t p = 0; p < g->world && !r->matched && code == PLX_OK; p++)
    if (p != g->rank && (r->src < 0 || r->src == (int32_t)p)) plx_take_unexpected(g, r, p);
  if (!mailbox->progressing) {
    while (atomic_load_explicit(&r->status, memory_order_relaxed) == PLX_PENDING && plx_take_in(g)) continue;
  } else {
    nudge(g);
  }
  code = atomic_load_explicit(&r->status, memory_order_relaxed);
  r->handed_over = handed_over;
  if (code == PLX_PENDING && mailbox->resting && mailbox->waiting == 0) pthread_cond_signal(&mailbox->work);
  pthread_mutex_unlock(&mailbox->lock);
  return code;
}

void plx_set_deadline(struct plx_group *g, struct plx_receive *r, uint64_t deadline_ns) {
  struct plx_mailbox *mailbox = g->mailbox;
  pthread_mutex_lock(&mailbox->lock);
  r->deadline_ns = deadline_ns;
  if (deadline_ns < mailbox->deadline_ns) mailbox->deadline_ns = deadline_ns;
  pthread_mutex_unlock(&mailbox->lock);
}

int plx_progress(struct plx_group *g, struct plx_wait *w, struct plx_receive *r) {
  struct plx_mailbox *mailbox = g->mailbox;
  uint64_t since = plx_now_ns();
  int code = PLX_OK;
  pthread_mutex_lock(&mailbox->lock);
  uint64_t finished = mailbox->finished;
  if (mailbox->progressing && mailbox->waiting == 0) nudge(g); /* the progress thread makes room */
  mailbox->waiting++;
  while (atomic_load_explicit(&r->status, memory_order_relaxed) == PLX_PENDING && mailbox->finished == finished &&
         code == PLX_OK && plx_now_ns() < w->deadline_ns)
    code = mailbox->progressing ? stand_by(g, w, since) : progress_once(g, w, since);
  mailbox->waiting--;
  if (mailbox->waiting != 0) pthread_cond_broadcast(&mailbox->changed);
  else if (mailbox->posted != NULL && mailbox->resting) pthread_cond_signal(&mailbox->work);
  pthread_mutex_unlock(&mailbox->lock);
  return code;
}

struct plx_receive *plx_take_ended(struct plx_group *g) {
  pthread_mutex_lock(&g->mailbox->lock);
  struct plx_receive *ended = g->mailbox->ended;
  g->mailbox->ended = NULL;
  pthread_mutex_unlock(&g->mailbox->lock);
  return ended;
}

void plx_poll_messages(struct plx_group *g) {
  pthread_mutex_lock(&g->mailbox->lock);
  if (!g->mailbox->progressing) plx_take_in(g);
  pthread_mutex_unlock(&g->mailbox->lock);
}

#define DOZE_NS 500000ull /* a receive that is waited for at once never meets the progress thread */

void plx_progress_thread(struct plx_group *g) {
  struct plx_mailbox *mailbox = g->mailbox;
  struct plx_wait w = {.deadline_ns = UINT64_MAX, .spin_ns = 0, .failed_rank = -1};
  int dozed = 0, ended = 0;
  pthread_mutex_lock(&mailbox->lock);
  while (!mailbox->stopped && !ended) {
    if (mailbox->posted == NULL || mailbox->waiting != 0 || mailbox->progressing) {
      mailbox->resting = 1;
      pthread_cond_wait(&mailbox->work, &mailbox->lock);
      mailbox->resting = dozed = 0;
    } else if (!dozed) {
      sleep_on(&mailbox->work, &mailbox->lock, DOZE_NS);
      dozed = 1;
    } else {
      uint64_t before = mailbox->finished;
      progress_once(g, &w, 0);
      ended = mailbox->finished != before;
      if (mailbox->waiting != 0) pthread_cond_broadcast(&mailbox->changed);
    }
  }
  pthread_mutex_unlock(&mailbox->lock);
}

void plx_mailbox_end(struct plx_group *g) {
  pthread_mutex_lock(&g->mailbox->lock);
  g->mailbox->stopped = 1;
  plx_finish_all(g, PLX_CLOSED, NULL);
  pthread_cond_broadcast(&g->mailbox->work);
  pthread_cond_broadcast(&g->mailbox->changed);
  pthread_mutex_unlock(&g->mailbox->lock);
}

void plx_stop_progress_thread(struct plx_group *g) {
  pthread_mutex_lock(&g->mailbox->lock);
  g->mailbox->stopped = 1;
  pthread_cond_signal(&g->mailbox->work);
  nudge(g);
  pthread_mutex_unlock(&g->mailbox->lock);
}

struct plx_mailbox *plx_mailbox_open(uint32_t world) {
  struct plx_mailbox *mailbox = calloc(1, sizeof *mailbox);
  if (mailbox == NULL) return NULL;
  mailbox->recv_channels = calloc(world, sizeof *mailbox->recv_channels);
  mailbox->send_locks = calloc(world, sizeof *mailbox->send_locks);
  if (mailbox->recv_channels == NULL || mailbox->send_locks == NULL) {
    free(mailbox->recv_channels);
    free(mailbox->send_locks);
    free(mailbox);
    return NULL;
  }
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_mutex_init(&mailbox->lock, NULL);
  pthread_cond_init(&mailbox->changed, &monotonic);
  pthread_cond_init(&mailbox->work, &monotonic);
  for (uint32_t r = 0; r < world; r++) pthread_mutex_init(&mailbox->send_locks[r], NULL);
  pthread_condattr_destroy(&monotonic);
  return mailbox;
}

struct plx_receive *plx_last_ended(struct plx_mailbox *mailbox) { return mailbox == NULL ? NULL : mailbox->ended; }

/* Locks and conditions hold no resources here, and in a forked child they may be held by threads that do not exist. */
void plx_mailbox_close(struct plx_mailbox *mailbox, uint32_t world) {
  if (mailbox == NULL) return;
  for (uint32_t r = 0; r < world; r++)
    while (mailbox->recv_channels[r].unexpected != NULL) {
      struct plx_message *m = mailbox->recv_channels[r].unexpected;
      mailbox->recv_channels[r].unexpected = m->next;
      free(m);
    }
  free(mailbox->recv_channels);
  free(mailbox->send_locks);
  free(mailbox);
}
