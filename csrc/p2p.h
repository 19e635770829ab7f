/* Messages use a ring of bytes for each ordered pair of ranks, and receives that are posted now and over later.
 *
 *   post      a receive takes its place among the posted ones; what is there already is taken at once
 *   progress  whoever waits takes in what comes, from all ranks, for all posted receives; one thread at a time does
 *   thread    the same by a thread of the group, while receives are posted and nobody waits
 *
 * A message goes to the first posted receive that names its tag and its sender (or anybody). One that fits none of them
 * is put into the unexpected queue, where the next receive that is posted finds it; a channel from which no posted receive
 * wants anything is left alone, and fills up until its sender waits.
 */
#ifndef PLX_P2P_H
#define PLX_P2P_H

#include "wait.h"

#define PLX_PENDING (-1)
#define PLX_WOULD_WAIT (-2)

/* This is a receive, from its posting until its status is no longer PLX_PENDING; it and `data` must stay that long. */
struct plx_receive {
  void *data;
  uint64_t bytes;
  uint64_t deadline_ns; /* the group ends when it passes */
  int32_t src;          /* below zero: any rank */
  uint32_t tag;
  uint32_t dtype;
  int handed_over; /* plx_take_ended gives it back, unless plx_post has said its end */

  uint32_t from; /* the rank that sent it, once it is over */
  _Atomic int status;
  int matched; /* its message has begun; `from` holds */
  struct plx_receive *next, *before; /* in the list of those that are posted; `next` also of those that have ended */
  struct plx_record *record;
  uint64_t recorded; /* records that this rank had written when it was posted */
};

/* Open both directions of one rank; the result is NULL when there is no memory. */
struct plx_mailbox *plx_mailbox_open(uint32_t world);
/* Close them when no thread uses them any more. */
void plx_mailbox_close(struct plx_mailbox *mailbox, uint32_t world);

/* Write a message into the channel to `dst`; messages of one thread keep their order. */
int plx_send(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *data, size_t bytes,
             uint32_t dst, uint32_t tag, int dtype);
/* Write it if that can be done without waiting; else return PLX_WOULD_WAIT, and nothing has happened. */
int plx_send_now(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *data, size_t bytes,
                 uint32_t dst, uint32_t tag, int dtype);

/* Post `r`, whose fields are filled up to `handed_over`, and return its status. It never waits, and its cost does not
 * depend on how many are posted. */
int plx_post(struct plx_group *g, const struct plx_origin *o, struct plx_receive *r);
/* Wait until `r` or any other posted receive is over, or w's deadline passes, which ends nothing. */
int plx_progress(struct plx_group *g, struct plx_wait *w, struct plx_receive *r);
/* End the group if the posted receive is not over at `deadline_ns`. */
void plx_set_deadline(struct plx_group *g, struct plx_receive *r, uint64_t deadline_ns);
/* Return the receives that are over since the last call and were to be handed over, the first to end first, by `next`. */
struct plx_receive *plx_take_ended(struct plx_group *g);
/* Do the same without a lock, for the last time, when no thread uses the mailbox any more. */
struct plx_receive *plx_last_ended(struct plx_mailbox *mailbox);
/* Take in the messages that have come, without waiting. */
void plx_poll_messages(struct plx_group *g);
/* Take in messages while nobody waits for them; returns when that has ended a receive, or after plx_stop_progress_thread. */
void plx_progress_thread(struct plx_group *g);
void plx_stop_progress_thread(struct plx_group *g);
/* Leave with this process: posted receives end with PLX_CLOSED, and no thread waits any longer. */
void plx_mailbox_end(struct plx_group *g);

#endif
