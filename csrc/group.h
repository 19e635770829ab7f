/* A rank's own view of the shared memory, and the gate that all collectives are made of. */
#ifndef PLX_GROUP_H
#define PLX_GROUP_H

#include "layout.h"

/* Called about every 50 ms while a rank waits. Returns non-zero to give up (a signal handler raised). */
typedef int (*plx_idle_fn)(void *context, uint64_t waited_ns);

struct plx_mail; /* messages in both directions; see p2p.h */

/* The processor's counter, set by the kernel's clock every few milliseconds; see recorder.c. */
struct plx_stopwatch {
  uint64_t ticks;   /* when it was set */
  uint64_t ns;      /* CLOCK_MONOTONIC then */
  uint64_t scale;   /* nanoseconds per tick, times 2^32; 0 while it is not known */
  uint32_t distrust; /* the counter did not run as the clock does: ask the clock every time */
};

struct plx_group {
  unsigned char *base;
  struct plx_header *header;
  uint32_t rank;
  uint32_t world;
  size_t stage_bytes;
  uint64_t step; /* gates that this rank has reached */
  uint64_t turn; /* stages that this rank has used */
  uint64_t seq;  /* collectives that this rank has begun */
  /* Collectives that another thread of this rank carries out: while these differ, step, turn, seq and what follows from
   * the calls (apart, absent, num_gone) are that thread's, and tell less than what this rank's program has issued. */
  _Atomic uint64_t issued;
  _Atomic uint64_t carried_out;
  uint64_t spin_ns;
  int crowded;
  int over; /* this rank has begun a collective after the group's end */
  int quiet; /* collectives here are steps of operations that the caller records itself */
  struct plx_record unseen; /* what they write instead */
  int *pidfds;             /* world entries; -1 where the process cannot be watched */
  unsigned char **heaps;   /* world entries: where each rank's heap is mapped here; NULL without symmetric memory */
  uint64_t heap_bytes;     /* of each heap */
  struct plx_mail *mail;
  struct plx_stopwatch stopwatch;

  /* The turn that this rank has left open (early.h): its gate, or 0; what it called; and the line in the recorder. */
  uint64_t open_step;
  struct plx_call open_call;
  struct plx_record *open_record;
  uint64_t recorded; /* lines that this rank had written when that was its last */

  /* Uneven inputs; see attendance.h. */
  int uneven;    /* training steps may do without ranks that wait at something else */
  uint32_t role; /* of the call to come: PLX_FLAG_* */
  uint32_t site; /* where it is called: index of "file:line" in the rank's table */
  int apart;     /* some rank was out of a step since all met */
  int newly_gone;
  uint64_t missed; /* rounds of gradients without everybody, since all met */
  uint32_t num_gone;
  unsigned char absent[PLX_MAX_WORLD]; /* out of the latest step */
  struct plx_call step_call;           /* what those in the step called when we found ourselves apart */
  struct plx_record *resumed;          /* of the call that will be made again */
};

/* One call into the core: how long it may take, and whom to ask while it waits. */
struct plx_wait {
  uint64_t deadline_ns; /* CLOCK_MONOTONIC; UINT64_MAX never comes */
  uint64_t spin_ns;
  plx_idle_fn idle;
  void *context;
  /* filled on failure */
  int32_t culprit; /* the rank that is lost or late, or -1 */
};

uint64_t plx_now_ns(void);

/* Bytes of shared memory for a group; 0 when the arguments make no sense. */
size_t plx_group_bytes(uint32_t world, size_t stage_bytes, size_t channel_bytes);
/* Write the header into zeroed memory. Leader only, before anybody else maps it. */
int plx_group_format(void *base, uint32_t world, size_t stage_bytes, size_t channel_bytes, int crowded);
/* Check a mapping's magic, version and size. */
int plx_group_check(const void *base, size_t bytes);

struct plx_rank *plx_rank_of(const struct plx_group *g, uint32_t rank);
struct plx_channel *plx_channel_of(const struct plx_group *g, uint32_t src, uint32_t dst);
unsigned char *plx_stage_of(const struct plx_group *g, uint32_t rank, uint64_t turn);

/* Reach the next gate and wait until every rank has. Release before, acquire after. */
int plx_gate(struct plx_group *g, struct plx_wait *w);
/* The two halves: reach it, then wait for everybody (plx_await), or only for what `peer` did before it reached it. */
int plx_arrive(struct plx_group *g, struct plx_wait *w);
int plx_await(struct plx_group *g, struct plx_wait *w, uint64_t step);
int plx_await_rank(struct plx_group *g, struct plx_wait *w, uint32_t peer, uint64_t step);

/* Sleep until `*word` differs from `seen`, at most one slice; then look whether waiting still makes sense: the
 * group's poison, the peers' processes (those for which `behind(peer)` holds), the deadline, the idle function. */
int plx_poisoned(struct plx_group *g, struct plx_wait *w);
int plx_peer_alive(struct plx_group *g, uint32_t peer);
/* End the group for everybody; the first cause wins. Wakes all sleepers. Returns the cause that holds. */
int plx_poison(struct plx_group *g, int code, uint32_t rank);

void plx_futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns);
void plx_futex_wake_all(_Atomic uint32_t *word);
void plx_relax(void);
_Atomic uint32_t *plx_low_half(_Atomic uint64_t *word);

#define PLX_SLICE_NS 50000000ull /* how long a rank sleeps before it looks around */
/* How often it looks at memory before it asks for the time, or yields its core before it sleeps; a checker sets them. */
#ifndef PLX_LOOKS
#define PLX_LOOKS 64
#define PLX_LOOKS_CROWDED 8
#endif

/* The program goes on, and another thread of this rank will carry out what it has called, in the order of the calls. */
void plx_issue(struct plx_group *g);
/* That thread has carried one out. */
void plx_carried_out(struct plx_group *g);
/* Whether that thread owes something: then this rank has issued more than its counters tell. Only the program issues, so
 * once it waits, and this says no, the counters are what it has issued. */
int plx_is_behind(struct plx_group *g);

/* Publish `call` for this turn. */
void plx_publish(struct plx_group *g, const struct plx_call *call);
/* Compare every rank's call of this turn with ours. Only after a gate. */
int plx_agree(struct plx_group *g, const struct plx_call *mine);
/* Whether `rank` called the same in this turn; it has reached the turn's gate. */
int plx_calls_same(const struct plx_group *g, uint32_t rank, const struct plx_call *mine);

#endif
