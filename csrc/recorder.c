/* The flight recorder costs little because it is always on: one cache line is written for most operations, and the time is
 * read from the processor's counter (9 ns here; clock_gettime takes 23).
 *
 *   clock  ──┬───────────────┬───────────────┬──   asked every SET_TICKS at most, and until the scale is known
 *   counter ─┴───────────────┴───────────────┴──   in between: ns + (ticks since) * scale
 */
#include "recorder.h"

#include "futex.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

#define SET_TICKS (1ull << 25)   /* 13 ms at 2.5 GHz: what an error of 1e-4 in the scale adds up to is a microsecond */
#define SCALE_TICKS (1ull << 22) /* a shorter span does not tell the scale to 1e-4 */

#if defined(__x86_64__)
/* Return whether the counter runs at one speed, whatever the core does (CPUID 8000_0007h, EDX bit 8). */
static int counter_is_steady(void) {
  unsigned a, b, c, d;
  return __get_cpuid(0x80000007u, &a, &b, &c, &d) && (d & 1u << 8);
}

/* Ask the clock, and set the counter by it. */
static uint64_t set_stopwatch(struct plx_stopwatch *s, uint64_t ticks) {
  uint64_t now = plx_now_ns(), passed = now - s->ns, ran = ticks - s->ticks;
  if (s->ticks == 0) {
    s->distrust = !counter_is_steady();
  } else if (ran < SCALE_TICKS) {
    return now; /* the first milliseconds: go on measuring */
  } else if (ran < 1ull << 62 && passed < 1ull << 62) {
    uint64_t scale = (uint64_t)(((unsigned __int128)passed << 32) / ran);
    /* A counter that another core or a moved machine has set differently shows here, and then no more. */
    if (s->scale != 0 && (scale > s->scale + s->scale / 256 || scale < s->scale - s->scale / 256)) s->distrust = 1;
    s->scale = scale < 1ull << 38 ? scale : 0;
  } else {
    s->distrust = 1;
  }
  s->ticks = ticks;
  s->ns = now;
  return now;
}
#endif

/* Return the time for a collective, of which a group runs one at a time. */
static uint64_t read_stopwatch(struct plx_stopwatch *s) {
#if defined(__x86_64__)
  if (!s->distrust) {
    uint64_t ticks = __rdtsc(), since = ticks - s->ticks;
    if (s->scale != 0 && since < SET_TICKS) return s->ns + (since * s->scale >> 32);
    return set_stopwatch(s, ticks);
  }
#else
  (void)s;
#endif
  return plx_now_ns();
}

/* Messages and rounds of gradients may run beside a collective, in other threads. */
static uint64_t time_of(struct plx_group *g, unsigned kind) {
  return kind < PLX_SEND || kind == PLX_BROADCAST_BUFFERS ? read_stopwatch(&g->stopwatch) : plx_now_ns();
}

/* Fields are written one by one: put together first, they would have to wait for each other. */
#define PUT(field, value) __atomic_store_n(&r->field, (value), __ATOMIC_RELAXED)
_Static_assert(offsetof(struct plx_record, shape) + sizeof(uint64_t) == 64, "the first size ends the first cache line");

static struct plx_record *write_entry(struct plx_group *g, const struct plx_call *call, const struct plx_origin *o,
                                      int32_t peer, uint64_t now, uint64_t *number) {
  struct plx_rank *me = plx_rank_of(g, g->rank);
  *number = atomic_fetch_add_explicit(&me->next_record, 1, memory_order_relaxed);
  struct plx_record *r = &me->records[*number % PLX_RECORDS];
  /* A reader skips a record whose sequence number is 0 or changes while it reads. */
  atomic_store_explicit(&r->seq, 0, memory_order_relaxed);
  atomic_thread_fence(memory_order_release);
  PUT(count, call->count);
  PUT(enter_ns, now);
  atomic_store_explicit(&r->leave_ns, 0, memory_order_relaxed);
  PUT(kind, call->kind);
  PUT(dtype, call->dtype);
  PUT(redop, call->redop);
  PUT(root, call->root);
  PUT(peer, peer);
  PUT(call_site, o->call_site);
  PUT(status, PLX_OK);
  PUT(flags, call->flags);
  PUT(ndim, o->ndim);
  for (uint32_t i = 0; i < o->ndim; i++) PUT(shape[i], o->shape[i]);
  atomic_store_explicit(&r->seq, call->seq, memory_order_release);
  return r;
}

static void write_end(struct plx_record *r, int status, uint64_t now) {
  uint64_t entered = __atomic_load_n(&r->enter_ns, __ATOMIC_RELAXED);
  PUT(status, (uint32_t)status);
  /* Setting the stopwatch can put it back a microsecond, but nothing ends before it began. */
  atomic_store_explicit(&r->leave_ns, now > entered ? now : entered, memory_order_release);
}

struct plx_record *plx_record_enter(struct plx_group *g, const struct plx_call *call, const struct plx_origin *o,
                                    int32_t peer) {
  uint64_t number;
  if (g->quiet) return &g->unseen;
  return write_entry(g, call, o, peer, time_of(g, call->kind), &number);
}

void plx_record_leave(struct plx_group *g, struct plx_record *record, int status) {
  if (record != &g->unseen) write_end(record, status, time_of(g, record->kind));
}

struct plx_record *plx_record_begin(struct plx_group *g, const struct plx_call *call, const struct plx_origin *o,
                                    int32_t peer, uint64_t *number) {
  return write_entry(g, call, o, peer, plx_now_ns(), number);
}

/* The recorder is a ring: by the time that an operation ends its line may tell of another. */
int plx_record_is_kept(struct plx_group *g, uint64_t recorded) {
  uint64_t written = atomic_load_explicit(&plx_rank_of(g, g->rank)->next_record, memory_order_relaxed);
  return written - recorded < PLX_RECORDS - 16; /* 16: others may be about to write */
}

void plx_record_leave_late(struct plx_group *g, struct plx_record *record, uint64_t recorded, int status) {
  if (plx_record_is_kept(g, recorded)) plx_record_leave(g, record, status);
}

void plx_record_end(struct plx_group *g, uint64_t number, int status) {
  struct plx_rank *me = plx_rank_of(g, g->rank);
  if (plx_record_is_kept(g, number + 1)) write_end(&me->records[number % PLX_RECORDS], status, plx_now_ns());
}

typedef uint64_t __attribute__((may_alias)) word;

int plx_record_read(const struct plx_rank *owner, uint64_t number, struct plx_record *copy) {
  const struct plx_record *r = &owner->records[number % PLX_RECORDS];
  uint64_t seq = atomic_load_explicit(&r->seq, memory_order_acquire);
  for (size_t i = 1; i < sizeof *r / sizeof(word); i++) /* by words: others write meanwhile */
    ((word *)copy)[i] = __atomic_load_n((const word *)r + i, __ATOMIC_RELAXED);
  atomic_thread_fence(memory_order_acquire);
  atomic_store_explicit(&copy->seq, seq, memory_order_relaxed);
  return seq != 0 && atomic_load_explicit(&r->seq, memory_order_relaxed) == seq;
}
