/* The files of point to point share the mailbox: one rank's messages in both directions.
 *
 * A message is an envelope of 64 bytes, then its bytes, padded to 64. The sender writes as space comes free, the receiver
 * reads as bytes arrive, so a message may be longer than the ring. Of a channel the sender's side belongs to whoever
 * holds `send_locks[dst]`, the receiver's to whoever holds `lock`; that is never held while waiting.
 */
#ifndef PLX_MAILBOX_H
#define PLX_MAILBOX_H

#include <pthread.h>

#include "p2p.h"

struct plx_envelope {
  uint64_t bytes;
  uint64_t seq;
  uint32_t tag;
  uint32_t dtype;
};

#define PLX_MESSAGE_LINE 64u

/* This is a message that came before its receive, or is coming. */
struct plx_message {
  struct plx_message *next;
  struct plx_envelope head;
  unsigned char data[];
};

/* This is the reading end of a channel. */
struct plx_recv_channel {
  struct plx_envelope head; /* the header of the message that is being read, if `open` */
  uint64_t at;              /* so many bytes of it were read, padding included */
  int open;
  uint64_t num_unmatched; /* posted receives that name this sender, and whose message has not begun */
  int wanted;                     /* some posted receive could take its next message; written by who makes progress */
  struct plx_receive *into;       /* where the message goes: to a receive, */
  struct plx_message *arriving;   /* or to the unexpected queue */
  struct plx_message *unexpected; /* they are in the order in which they came */
  struct plx_message **unexpected_end;
};

struct plx_mailbox {
  pthread_mutex_t lock;       /* it guards all but the send_locks */
  pthread_cond_t changed;     /* no thread makes progress any more, or a receive is over */
  pthread_cond_t work;        /* there is something for the progress thread */
  struct plx_receive *posted, *last_posted; /* they are in the order of posting */
  struct plx_receive *ended, *last_ended;   /* they are over, and wait to be handed over */
  uint64_t num_unmatched;  /* posted receives from any rank whose message has not begun */
  uint64_t deadline_ns;    /* the first of those of the posted receives, or of one that is over */
  uint64_t finished;       /* receives that are over */
  uint64_t looked_ns;
  int progressing; /* a thread makes progress */
  int waiting;     /* how many wait for receives */
  int resting;     /* the progress thread has nothing to do */
  int stopped;
  struct plx_recv_channel *recv_channels;
  pthread_mutex_t *send_locks;
};

static inline size_t plx_padded(size_t n) { return (n + PLX_MESSAGE_LINE - 1) / PLX_MESSAGE_LINE * PLX_MESSAGE_LINE; }

/* Messages have no number; a reader of the recorder sees by this one that a line was written over. */
static inline uint64_t plx_next_record(const struct plx_group *g) {
  return 1 + atomic_load_explicit(&plx_rank_of(g, g->rank)->next_record, memory_order_relaxed);
}

/* The caller holds `lock`; see match.c. */

/* Count a posted receive whose message has not begun. */
void plx_count_unmatched(struct plx_mailbox *mailbox, const struct plx_receive *r, int by);
/* Take in one piece of every channel from which a receive wants something; return whether there was any. */
int plx_take_in(struct plx_group *g);
/* Give `r` what has come for it from `src` before it was posted, whole or begun. */
void plx_take_unexpected(struct plx_group *g, struct plx_receive *r, uint32_t src);
/* End every posted receive, since the group is over. `failed`, if any, is the one that did not fit. Return `code`. */
int plx_finish_all(struct plx_group *g, int code, const struct plx_receive *failed);
/* Return whether waiting still makes sense; if not, all receives are over. */
int plx_check_receives(struct plx_group *g, struct plx_wait *w);
/* Return whether something lies in the channel from `src`. */
int plx_has_bytes(struct plx_group *g, uint32_t src);

#endif
