/* This file finds the receive to which a message goes. The caller holds the mailbox's lock. */
#include <stdlib.h>
#include <string.h>

#include "copy.h"
#include "futex.h"
#include "mailbox.h"
#include "recorder.h"

static size_t min(size_t a, size_t b) { return a < b ? a : b; }

/* A receive may be posted for long. The recorder is a ring: by now its line may tell of another operation. */
static struct plx_record *record_of(struct plx_group *g, const struct plx_receive *r) {
  return plx_record_is_kept(g, r->recorded) ? r->record : NULL;
}

void plx_count_unmatched(struct plx_mailbox *mailbox, const struct plx_receive *r, int by) {
  *(r->src < 0 ? &mailbox->num_unmatched : &mailbox->recv_channels[r->src].num_unmatched) += (uint64_t)(int64_t)by;
}

static void unlink_posted(struct plx_mailbox *mailbox, struct plx_receive *r) {
  *(r->before != NULL ? &r->before->next : &mailbox->posted) = r->next;
  *(r->next != NULL ? &r->next->before : &mailbox->last_posted) = r->before;
}

static void append_ended(struct plx_mailbox *mailbox, struct plx_receive *r) {
  r->next = NULL;
  *(mailbox->ended != NULL ? &mailbox->last_ended->next : &mailbox->ended) = r;
  mailbox->last_ended = r;
}

static void finish(struct plx_group *g, struct plx_receive *r, int code, int recorded_code) {
  if (!r->matched) plx_count_unmatched(g->mailbox, r, -1);
  unlink_posted(g->mailbox, r);
  if (r->handed_over) append_ended(g->mailbox, r);
  struct plx_record *record = record_of(g, r);
  if (record != NULL) plx_record_leave(g, record, recorded_code);
  g->mailbox->finished++;
  atomic_store_explicit(&r->status, code, memory_order_release);
  if (g->mailbox->waiting != 0) pthread_cond_broadcast(&g->mailbox->changed);
}

/* End every posted receive, since the group is over. `failed_rank`, if any, is the one that did not fit. */
int plx_finish_all(struct plx_group *g, int code, const struct plx_receive *failed_rank) {
  for (uint32_t r = 0; r < g->world; r++) g->mailbox->recv_channels[r].into = NULL;
  while (g->mailbox->posted != NULL) {
    struct plx_receive *r = g->mailbox->posted;
    finish(g, r, code, failed_rank == NULL || r == failed_rank ? code : PLX_INTERRUPTED);
  }
  return code;
}

int plx_has_bytes(struct plx_group *g, uint32_t src) {
  struct plx_channel *c = plx_channel_of(g, src, g->rank);
  return atomic_load_explicit(&c->head, memory_order_seq_cst) != atomic_load_explicit(&c->tail, memory_order_relaxed);
}

static int is_fit(const struct plx_envelope *head, const struct plx_receive *r) {
  return head->bytes == r->bytes && head->dtype == r->dtype;
}

static void match(struct plx_group *g, struct plx_receive *r, uint32_t src) {
  struct plx_record *record = record_of(g, r);
  if (record != NULL) __atomic_store_n(&record->peer, (int32_t)src, __ATOMIC_RELAXED);
  plx_count_unmatched(g->mailbox, r, -1);
  r->from = src;
  r->matched = 1;
}

/* Decide where a message goes that begins. */
static int begin(struct plx_group *g, uint32_t src, const struct plx_envelope *head) {
  struct plx_recv_channel *in = &g->mailbox->recv_channels[src];
  struct plx_receive *r = g->mailbox->posted;
  while (r != NULL && (r->matched || r->tag != head->tag || (r->src >= 0 && r->src != (int32_t)src))) r = r->next;
  if (r != NULL) {
    match(g, r, src);
    if (!is_fit(head, r)) return plx_finish_all(g, plx_poison(g, PLX_MISMATCH, g->rank), r);
  } else {
    struct plx_message *m = malloc(sizeof *m + head->bytes);
    if (m == NULL) return plx_finish_all(g, plx_poison(g, PLX_NO_MEMORY, g->rank), NULL);
    m->next = NULL;
    m->head = *head;
    *(in->unexpected != NULL ? in->unexpected_end : &in->unexpected) = in->arriving = m;
    in->unexpected_end = &m->next;
  }
  in->into = r;
  in->head = *head;
  in->at = 0;
  in->open = 1;
  return PLX_OK;
}

/* Take one piece out of the channel from `src`, if one is there; return whether there was. */
static int advance(struct plx_group *g, uint32_t src) {
  struct plx_recv_channel *in = &g->mailbox->recv_channels[src];
  struct plx_channel *c = plx_channel_of(g, src, g->rank);
  uint64_t size = g->header->channel_bytes, tail = atomic_load_explicit(&c->tail, memory_order_relaxed);
  uint64_t head = atomic_load_explicit(&c->head, memory_order_acquire);
  if (head == tail) return 0;
  if (!in->open) {
    struct plx_envelope envelope;
    memcpy(&envelope, c->data + tail % size, sizeof envelope);
    if (begin(g, src, &envelope) != PLX_OK) return 1;
    tail += PLX_MESSAGE_LINE;
  }
  uint64_t end = plx_padded(in->head.bytes), n = in->head.bytes;
  size_t piece = min(min(head - tail, size - tail % size), min(end - in->at, size / 8));
  char *to = in->into != NULL ? in->into->data : in->arriving != NULL ? (char *)in->arriving->data : NULL;
  if (in->at < n && to != NULL) plx_copy(to + in->at, c->data + tail % size, min(piece, n - in->at));
  tail += piece;
  in->at += piece;
  atomic_store_explicit(&c->tail, tail, memory_order_seq_cst);
  if (atomic_load_explicit(&c->tail_sleepers, memory_order_seq_cst) != 0) plx_futex_wake_all(plx_low_half(&c->tail));
  if (in->at == end) {
    struct plx_receive *r = in->into;
    in->open = 0;
    in->into = NULL;
    in->arriving = NULL;
    if (r != NULL) finish(g, r, PLX_OK, PLX_OK);
  }
  return 1;
}

static int is_wanted(const struct plx_mailbox *mailbox, uint32_t src) {
  const struct plx_recv_channel *in = &mailbox->recv_channels[src];
  return (mailbox->posted != NULL && in->open) || mailbox->num_unmatched + in->num_unmatched != 0;
}

/* Take in one piece of every channel from which a receive wants something; return whether there was any. */
int plx_take_in(struct plx_group *g) {
  int moved = 0;
  for (uint32_t r = 0; r < g->world; r++) {
    if (r == g->rank) continue;
    g->mailbox->recv_channels[r].wanted = is_wanted(g->mailbox, r);
    if (g->mailbox->recv_channels[r].wanted) moved |= advance(g, r);
  }
  return moved;
}

/* Give `r` what lies in the unexpected queue for it, whole or begun. */
void plx_take_unexpected(struct plx_group *g, struct plx_receive *r, uint32_t src) {
  struct plx_recv_channel *in = &g->mailbox->recv_channels[src];
  struct plx_message **at = &in->unexpected;
  while (*at != NULL && (*at)->head.tag != r->tag) at = &(*at)->next;
  struct plx_message *m = *at;
  if (m == NULL) return;
  match(g, r, src);
  if (!is_fit(&m->head, r)) {
    plx_finish_all(g, plx_poison(g, PLX_MISMATCH, g->rank), r);
    return;
  }
  *at = m->next;
  if (in->unexpected_end == &m->next) in->unexpected_end = at;
  plx_copy(r->data, m->data, m == in->arriving ? min(in->at, r->bytes) : r->bytes);
  if (m == in->arriving) {
    in->arriving = NULL;
    in->into = r;
  } else {
    finish(g, r, PLX_OK, PLX_OK);
  }
  free(m);
}

/* Return whether a posted receive waits for what no living rank can still send: all that was sent has been read. Only ranks
 * for which a receive waits are asked after. */
static int is_hopeless(struct plx_group *g, uint32_t *failed_rank) {
  int anybody = g->mailbox->num_unmatched != 0;
  for (uint32_t p = 0; p < g->world; p++) {
    const struct plx_recv_channel *in = &g->mailbox->recv_channels[p];
    int alone = in->num_unmatched != 0 || in->into != NULL;
    if (p == g->rank || !(alone || anybody)) continue;
    if (plx_peer_lost(g, p) && !plx_has_bytes(g, p)) {
      *failed_rank = p;
      if (alone) return 1;
    } else {
      anybody = 0;
    }
  }
  return anybody;
}

/* Return whether the deadline of a posted receive has passed. They are looked at one by one only when the first of those
 * that were posted has, which may be that of a receive that is over. */
static int is_late(struct plx_mailbox *mailbox, uint64_t now) {
  if (now < mailbox->deadline_ns) return 0;
  mailbox->deadline_ns = UINT64_MAX;
  for (const struct plx_receive *r = mailbox->posted; r != NULL; r = r->next)
    if (r->deadline_ns < mailbox->deadline_ns) mailbox->deadline_ns = r->deadline_ns;
  return now >= mailbox->deadline_ns;
}

/* Return whether waiting still makes sense; if not, all receives are over. */
int plx_check_receives(struct plx_group *g, struct plx_wait *w) {
  uint64_t now = g->mailbox->looked_ns = plx_now_ns();
  int code = plx_poisoned(g, w);
  uint32_t failed_rank = g->rank;
  if (code == PLX_OK && is_hopeless(g, &failed_rank)) code = plx_poison(g, PLX_PEER_LOST, failed_rank);
  else if (code == PLX_OK && is_late(g->mailbox, now)) code = plx_poison(g, PLX_DEADLINE, g->rank);
  return code == PLX_OK ? PLX_OK : plx_finish_all(g, code, NULL);
}
