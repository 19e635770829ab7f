/* A plx_group is a rank's own view of the shared memory of one group. */
#ifndef PLX_GROUP_H
#define PLX_GROUP_H

#include "layout.h"

struct plx_mailbox; /* messages in both directions; see p2p.h */

/* This is the processor's counter, set by the kernel's clock every few milliseconds; see recorder.c. */
struct plx_stopwatch {
  uint64_t ticks;    /* the counter when it was set */
  uint64_t ns;       /* CLOCK_MONOTONIC at that time */
  uint64_t scale;    /* nanoseconds per tick, times 2^32; 0 while it is not known */
  uint32_t distrust; /* the counter did not run as the clock does: ask the clock every time */
};

/* This is a phase whose sync this rank has reached and not waited at (early.h). */
struct plx_open_phase {
  uint64_t step; /* 0: there is none */
  struct plx_call call;
  struct plx_record *record;
  uint64_t recorded; /* lines that this rank had written when the phase's line was its last */
};

struct plx_group {
  unsigned char *base;
  struct plx_header *header;
  uint32_t rank;
  uint32_t world;
  size_t stage_bytes;
  uint64_t step;  /* syncs that this rank has reached */
  uint64_t phase; /* stages that this rank has used */
  uint64_t seq;   /* collectives that this rank has begun */
  /* These count collectives that another thread of this rank carries out: while they differ, step, phase and seq are that
   * thread's, and tell less than what this rank's program has issued. */
  _Atomic uint64_t issued;
  _Atomic uint64_t carried_out;
  uint64_t spin_ns;
  int oversubscribed;
  int over;  /* this rank has begun a collective after the group's end */
  int quiet; /* collectives here are steps of operations that the caller records itself */
  struct plx_record unseen; /* they write this line instead */
  int *pidfds;              /* world entries; -1 where the process cannot be watched */
  int *stats;               /* world entries: each process's /proc/PID/stat, open; -1 where it cannot be read; NULL: nowhere */
  unsigned char **heaps;    /* world entries: where each rank's heap is mapped here; NULL without any */
  uint64_t heap_bytes;      /* of each heap */
  struct plx_mailbox *mailbox;
  struct plx_open_phase open;
  struct plx_stopwatch stopwatch;
};

/* It says where an operation was called, and on what shape. */
struct plx_origin {
  uint32_t call_site; /* index of "file:line" in the rank's table */
  uint32_t ndim;
  const uint64_t *shape;
};

static inline struct plx_rank *plx_rank_of(const struct plx_group *g, uint32_t rank) {
  return (struct plx_rank *)(g->base + g->header->rank_offset + rank * g->header->rank_stride);
}

static inline struct plx_channel *plx_channel_of(const struct plx_group *g, uint32_t src, uint32_t dst) {
  return (struct plx_channel *)(g->base + g->header->channel_offset +
                                ((uint64_t)src * g->world + dst) * g->header->channel_stride);
}

unsigned char *plx_stage_of(const struct plx_group *g, uint32_t rank, uint64_t phase);

/* Return whether the process of `peer` is there, and has not left. */
int plx_peer_alive(struct plx_group *g, uint32_t peer);
/* Return whether `peer` does nothing more in this group: its process has ended, or it has left, or the process is being
 * ended. In that state no thread of it runs any more, and the kernel frees its memory before its pidfd tells: that takes a
 * tenth of a second and more for a gigabyte. Until then a device or a system call of it may still write memory. */
int plx_peer_lost(struct plx_group *g, uint32_t peer);

/* End the group for everybody; the first cause wins. Wake all sleepers. Return the cause that holds. */
int plx_poison(struct plx_group *g, int code, uint32_t rank);

/* Note that the program goes on, and that another thread of this rank will carry out what it has called, in the order of
 * the calls. */
void plx_issue(struct plx_group *g);
/* Note that that thread has carried one out. */
void plx_carried_out(struct plx_group *g);
/* Return whether that thread owes something: then this rank has issued more than its counters tell. Only the program
 * issues, so once it waits, and this says no, the counters are what it has issued. */
int plx_is_behind(struct plx_group *g);

#endif
