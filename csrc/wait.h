/* All waits end in this one way before what they wait for has come. */
#ifndef PLX_WAIT_H
#define PLX_WAIT_H

#include "group.h"

/* Called about every 50 ms while a rank waits. Returns non-zero to give up (a signal handler raised). */
typedef int (*plx_idle_fn)(void *context, uint64_t waited_ns);

/* This is one call into the core: how long it may take, and whom to ask while it waits. */
struct plx_wait {
  uint64_t deadline_ns; /* CLOCK_MONOTONIC; UINT64_MAX never comes */
  uint64_t spin_ns;
  plx_idle_fn idle;
  void *context;
  /* these are filled on failure */
  int32_t failed_rank; /* the rank that is lost or late, or -1 */
};

/* A rank sleeps a quarter of the time that it has waited before it looks around again, at least and at most so long: most
 * ranks that are lost have been waited for but a short time, and are missed soon. */
#define PLX_FIRST_SLICE_NS 1000000ull
#define PLX_SLICE_NS 50000000ull
/* It looks at memory so often before it asks for the time, or yields its core before it sleeps; a checker sets them. */
#ifndef PLX_LOOKS
#define PLX_LOOKS 64
#define PLX_LOOKS_OVERSUBSCRIBED 8
#endif

/* Return PLX_OK, or what has ended the group. */
static inline int plx_poisoned(struct plx_group *g, struct plx_wait *w) {
  uint64_t poison = atomic_load_explicit(&g->header->poison, memory_order_acquire);
  if (poison == 0) return PLX_OK;
  w->failed_rank = (int32_t)(poison >> 8);
  return (int)(poison & 0xff);
}

/* End the group, and name `failed` as the rank that threads that wait here are told of. Return the cause that holds. */
int plx_fail(struct plx_group *g, struct plx_wait *w, int code, uint32_t failed);

/* Return whether the caller wants to go on waiting; `since_ns` is when this wait began. If not, the group is over. */
int plx_ask_caller(struct plx_group *g, struct plx_wait *w, uint64_t since_ns);

/* Return whether waiting, for `late` among others, still makes sense: the group's poison, the deadline and, after the
 * longest slice, the caller decide. Code that knows what a rank was to do deals with a rank that is gone. */
int plx_check_wait(struct plx_group *g, struct plx_wait *w, uint32_t late, uint64_t since_ns);

/* Return how long to sleep now in a wait that began at `since_ns`: a slice, or what is left. */
uint64_t plx_slice_ns(const struct plx_wait *w, uint64_t since_ns);

#endif
