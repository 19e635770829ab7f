/* Random sequences of all operations of the C core, verified, with ranks as threads over one piece of memory. Each rank
 * has a second thread that attends to its messages, and one thread reads everybody's flight recorder all the time.
 *
 *   for each world size 2..5, oversubscribed and not: a few hundred operations that all threads draw from one seed
 *   then, for each way in which a group can end: all threads learn the same cause, in time, and nothing was written
 *
 * Build it with csrc/{all but py_*}.c under -fsanitize=address,undefined or =thread; `make sanitize` does.
 * Usage: stress [operations per group [seed]]. Exit code 0: nothing found.
 */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "agreement.h"
#include "collectives.h"
#include "copy.h"
#include "early.h"
#include "futex.h"
#include "p2p.h"
#include "recorder.h"
#include "reduce.h"
#include "reducer.h"

#define MAX_WORLD 5u
#define STAGE 8192u /* small, so that most tensors take several phases */
#define CHANNEL 4096u
#define HEAP (1u << 20)
#define MOST 20000u /* elements of a tensor */

#define CHECK(what)                                                                                              \
  do {                                                                                                           \
    if (!(what)) {                                                                                               \
      fprintf(stderr, "%s:%d: world %u, rank %u, operation %u: %s\n", __FILE__, __LINE__, t->g.world, t->g.rank, \
              t->operation, #what);                                                                              \
      exit(1);                                                                                                   \
    }                                                                                                            \
  } while (0)

#define FLAGS (512u << 10) /* where in the heap the reducer's flags lie, and its buckets */
#define BUCKETS (640u << 10)
#define AREAS (256u << 10) /* of broadcasts for which their root does not wait */
#define NUM_BUCKETS 5u
#define NUM_BESIDE 12u /* asynchronous calls, and rounds beside them */

enum ending { FINISH, NEVER_COME, POISON, LEAVE, CALL_ANOTHER, POISON_ROUND, LEAVE_ROUND, DIE_AT_SYNC, ANY_TIME, NUM_ENDINGS };

struct thread {
  struct plx_group g;
  struct plx_wait wait;
  uint64_t random; /* the same in all threads */
  uint32_t operation, operations;
  enum ending ending;
  pthread_t id, progress;
  _Atomic int over; /* the progress thread may go */
  int32_t *in, *out;
  struct plx_reducer reducer;
  struct plx_bucket buckets[NUM_BUCKETS];
  uint64_t offsets[NUM_BUCKETS]; /* of the buckets, in this rank's heap */
  uint32_t areas;  /* broadcasts through the heap, or that could have gone that way */
  uint64_t before; /* calls that were issued before the asynchronous ones */
};

static const struct plx_origin here;

static uint32_t draw(struct thread *t, uint32_t below) {
  t->random = t->random * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(t->random >> 33) % below;
}

static uint32_t draw_size(struct thread *t) {
  static const uint32_t sizes[] = {0, 1, 3, 15, 16, 17, 1000, 1024, 1025, 2047, 2048, 2049, 4097, 9999, MOST};
  return sizes[draw(t, sizeof sizes / sizeof *sizes)];
}

/* What `rank` holds at place `i` in this operation. */
static int32_t value(const struct thread *t, uint32_t rank, size_t i) {
  return (int32_t)((rank * 7919u + t->operation * 104729u + (uint32_t)i * 31u) % 1000u);
}

static void fill(const struct thread *t, int32_t *to, uint32_t rank, size_t first, size_t n) {
  for (size_t i = 0; i < n; i++) to[i] = value(t, rank, first + i);
}

static int holds(const struct thread *t, const int32_t *at, uint32_t rank, size_t first, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (at[i] != value(t, rank, first + i)) return 0;
  return 1;
}

static int holds_sum(const struct thread *t, const int32_t *at, size_t first, size_t n) {
  for (size_t i = 0; i < n; i++) {
    int32_t sum = 0;
    for (uint32_t r = 0; r < t->g.world; r++) sum += value(t, r, first + i);
    if (at[i] != sum) return 0;
  }
  return 1;
}

static void all_reduce(struct thread *t) {
  struct plx_group *g = &t->g;
  size_t n = draw_size(t);
  uint32_t where = draw(t, 5), odd = draw(t, g->world), root = draw(t, g->world);
  int32_t *own = t->in;
  /* 0, 1: private. 2: all at one place of the heap. 3: one of them private. 4: one of them at another place. */
  if (where >= 2) own = (int32_t *)(g->heaps[g->rank] + 64 * draw(t, 100));
  if (where == 3 && g->rank == odd) own = t->in;
  if (where == 4 && g->rank == odd) own += 4;
  fill(t, own, g->rank, 0, n);
  if (where == 0) {
    CHECK(plx_all_reduce(g, &t->wait, &here, own, t->out, n, PLX_I32, PLX_SUM, -1) == PLX_OK);
    CHECK(holds_sum(t, t->out, 0, n));
    CHECK(holds(t, own, g->rank, 0, n));
  } else if (where == 1) {
    CHECK(plx_all_reduce(g, &t->wait, &here, own, own, n, PLX_I32, PLX_SUM, (int)root) == PLX_OK);
    CHECK(g->rank == root ? holds_sum(t, own, 0, n) : holds(t, own, g->rank, 0, n));
  } else {
    CHECK(plx_all_reduce(g, &t->wait, &here, own, own, n, PLX_I32, PLX_SUM, -1) == PLX_OK);
    CHECK(holds_sum(t, own, 0, n));
  }
}

static void reduce_scatter(struct thread *t) {
  struct plx_group *g = &t->g;
  size_t counts[MAX_WORLD], starts[MAX_WORLD], at = 0, even = draw_size(t) / MAX_WORLD;
  const void *in[MAX_WORLD];
  int uneven = (int)draw(t, 2);
  for (uint32_t r = 0; r < g->world; r++) {
    counts[r] = uneven ? draw_size(t) / MAX_WORLD : even;
    starts[r] = at;
    in[r] = t->in + at;
    at += counts[r];
  }
  fill(t, t->in, g->rank, 0, at);
  CHECK(plx_reduce_scatter(g, &t->wait, &here, in, counts, t->out, PLX_I32, PLX_SUM) == PLX_OK);
  CHECK(holds_sum(t, t->out, starts[g->rank], counts[g->rank]));
}

static void gather(struct thread *t) {
  struct plx_group *g = &t->g;
  size_t bytes[MAX_WORLD], at = 0, even = draw_size(t) / MAX_WORLD;
  void *out[MAX_WORLD];
  int uneven = (int)draw(t, 2), root = (int)draw(t, g->world + 1) - 1;
  for (uint32_t r = 0; r < g->world; r++) {
    bytes[r] = 4 * (uneven ? draw_size(t) / MAX_WORLD : even);
    out[r] = t->out + at;
    at += bytes[r] / 4;
  }
  fill(t, t->in, g->rank, 0, bytes[g->rank] / 4);
  CHECK(plx_gather(g, &t->wait, &here, t->in, out, bytes, PLX_I32, root) == PLX_OK);
  for (uint32_t r = 0; (root < 0 || (uint32_t)root == g->rank) && r < g->world; r++)
    CHECK(holds(t, out[r], r, 0, bytes[r] / 4));
}

static void broadcast(struct thread *t) {
  size_t n = draw_size(t);
  uint32_t root = draw(t, t->g.world);
  fill(t, t->in, t->g.rank, 0, n);
  CHECK(plx_broadcast(&t->g, &t->wait, &here, t->in, 4 * n, PLX_I32, (int)root) == PLX_OK);
  CHECK(holds(t, t->in, root, 0, n));
}

/* The root goes on at once; what it writes next, here or in another operation, must not be what others still read. */
static void broadcast_buffers(struct thread *t) {
  size_t n = draw_size(t);
  uint32_t root = draw(t, t->g.world);
  unsigned char *area = t->g.heaps[t->g.rank] + AREAS + (t->areas++ % 2) * 4 * MOST;
  fill(t, t->in, t->g.rank, 0, n);
  CHECK(plx_broadcast_buffers(&t->g, &t->wait, &here, t->in, 4 * n, area, PLX_I32, (int)root, t->operation) == PLX_OK);
  CHECK(holds(t, t->in, root, 0, n));
}

static void scatter(struct thread *t) {
  struct plx_group *g = &t->g;
  size_t n = draw_size(t) / MAX_WORLD;
  uint32_t root = draw(t, g->world);
  const void *in[MAX_WORLD];
  for (uint32_t r = 0; r < g->world; r++) in[r] = t->in + r * n;
  fill(t, t->in, g->rank, 0, n * g->world);
  CHECK(plx_scatter(g, &t->wait, &here, in, t->out, 4 * n, PLX_I32, (int)root) == PLX_OK);
  CHECK(holds(t, t->out, root, g->rank * n, n));
}

static void all_to_all(struct thread *t) {
  struct plx_group *g = &t->g;
  size_t counts[MAX_WORLD][MAX_WORLD], in_bytes[MAX_WORLD], out_bytes[MAX_WORLD], even = draw_size(t) / MAX_WORLD;
  const void *in[MAX_WORLD];
  void *out[MAX_WORLD];
  int uneven = (int)draw(t, 2);
  for (uint32_t r = 0; r < g->world; r++)
    for (uint32_t d = 0; d < g->world; d++) counts[r][d] = uneven ? draw_size(t) / MAX_WORLD : even;
  size_t from = 0, to = 0;
  for (uint32_t r = 0; r < g->world; r++) {
    in[r] = t->in + from;
    out[r] = t->out + to;
    in_bytes[r] = 4 * counts[g->rank][r];
    out_bytes[r] = 4 * counts[r][g->rank];
    from += counts[g->rank][r];
    to += counts[r][g->rank];
  }
  fill(t, t->in, g->rank, 0, from);
  CHECK(plx_all_to_all(g, &t->wait, &here, in, in_bytes, out, out_bytes, PLX_I32, uneven) == PLX_OK);
  for (uint32_t r = 0; r < g->world; r++) {
    size_t first = 0;
    for (uint32_t d = 0; d < g->rank; d++) first += counts[r][d];
    CHECK(holds(t, out[r], r, first, counts[r][g->rank]));
  }
}

/* As a blocking receive does it: post, then wait. */
static int receive(struct thread *t, void *data, size_t bytes, int32_t src, uint32_t tag, uint32_t *from) {
  struct plx_receive r = {.data = data, .bytes = bytes, .deadline_ns = t->wait.deadline_ns, .src = src, .tag = tag,
                          .dtype = PLX_I32};
  int code = plx_post(&t->g, &here, &r);
  while (code == PLX_PENDING) {
    plx_progress(&t->g, &t->wait, &r);
    code = atomic_load_explicit(&r.status, memory_order_acquire);
  }
  *from = r.from;
  return code;
}

/* Everybody sends two tags to everybody, longer than the ring, and expects them in the other order; one of the receives
 * is from anybody. Nobody waits before all is sent: the progress threads take the messages in. */
static void exchange(struct thread *t) {
  struct plx_group *g = &t->g;
  size_t n = draw_size(t) / MAX_WORLD;
  uint32_t first = 8 * t->operation, count = 0, heard = 0, left = 0;
  struct plx_receive posted[2 * MAX_WORLD] = {0};
  for (uint32_t tag = 2; tag >= 1; tag--)
    for (uint32_t p = 0; p < g->world; p++) {
      if (p == g->rank) continue;
      posted[count] = (struct plx_receive){.data = t->out + count * n, .bytes = 4 * n, .tag = first + tag, .dtype = PLX_I32,
                                           .deadline_ns = t->wait.deadline_ns, .src = tag == 1 ? -1 : (int32_t)p,
                                           .handed_over = p % 2 == 0};
      int code = plx_post(g, &here, &posted[count]);
      CHECK(code == PLX_PENDING || code == PLX_OK);
      left += code == PLX_PENDING && posted[count].handed_over;
      count++;
    }
  fill(t, t->in, g->rank, 0, n);
  for (uint32_t i = 1; i < g->world; i++)
    for (uint32_t tag = 1; tag <= 2; tag++) {
      uint32_t to = (g->rank + i) % g->world;
      int code = plx_send_now(g, &t->wait, &here, t->in, 4 * n, to, first + tag, PLX_I32);
      if (code == PLX_WOULD_WAIT) code = plx_send(g, &t->wait, &here, t->in, 4 * n, to, first + tag, PLX_I32);
      CHECK(code == PLX_OK);
    }
  plx_poll_messages(g);
  while (count-- > 0) {
    struct plx_receive *r = &posted[count];
    while (atomic_load_explicit(&r->status, memory_order_acquire) == PLX_PENDING)
      CHECK(plx_progress(g, &t->wait, r) == PLX_OK);
    CHECK(atomic_load(&r->status) == PLX_OK);
    CHECK(r->src < 0 || r->from == (uint32_t)r->src);
    CHECK(holds(t, r->data, r->from, 0, n));
    if (r->src < 0) heard |= 1u << r->from;
  }
  CHECK(heard == ((1u << g->world) - 1 - (1u << g->rank)));
  for (struct plx_receive *r = plx_take_ended(g); r != NULL; r = r->next, left--) CHECK(r->handed_over);
  CHECK(left == 0);
}

/* Around in a circle; even ranks send first, odd ranks receive first, so messages may be longer than the ring. */
static void pass_on(struct thread *t) {
  struct plx_group *g = &t->g;
  uint32_t right = (g->rank + 1) % g->world, left = (g->rank + g->world - 1) % g->world, from;
  size_t n = draw_size(t);
  fill(t, t->in, g->rank, 0, n);
  for (int step = 0; step < 2; step++) {
    if ((uint32_t)step == g->rank % 2) {
      CHECK(plx_send(g, &t->wait, &here, t->in, 4 * n, right, 5, PLX_I32) == PLX_OK);
    } else {
      CHECK(receive(t, t->out, 4 * n, (int)left, 5, &from) == PLX_OK);
      CHECK(from == left);
      CHECK(holds(t, t->out, left, 0, n));
    }
  }
}

/* Rank 0 hears three tags of everybody, the last first, from whoever comes; the others send in order. The tags are this
 * operation's own, because a fast sender may already be in the next one. */
static void hear_everybody(struct thread *t) {
  struct plx_group *g = &t->g;
  size_t n = draw_size(t) / 8;
  if (g->rank != 0) {
    fill(t, t->in, g->rank, 0, n);
    for (uint32_t tag = 1; tag <= 3; tag++)
      CHECK(plx_send(g, &t->wait, &here, t->in, 4 * n, 0, 8 * t->operation + 3 + tag, PLX_I32) == PLX_OK);
    return;
  }
  for (uint32_t tag = 3; tag >= 1; tag--) {
    uint32_t heard = 0, from;
    for (uint32_t i = 1; i < g->world; i++) {
      CHECK(receive(t, t->out, 4 * n, -1, 8 * t->operation + 3 + tag, &from) == PLX_OK);
      CHECK(from >= 1 && from < g->world && (heard & 1u << from) == 0);
      CHECK(holds(t, t->out, from, 0, n));
      heard |= 1u << from;
    }
  }
}

static void barrier(struct thread *t) { CHECK(plx_barrier(&t->g, &t->wait, &here) == PLX_OK); }

/* The last bucket first, as in a backward, and the middle one last on odd ranks. */
static void give(struct thread *t, uint32_t buckets) {
  for (uint32_t i = 0; i < buckets; i++) {
    uint32_t b = (NUM_BUCKETS - 1 - i + (t->g.rank % 2) * 2) % NUM_BUCKETS;
    fill(t, (int32_t *)(t->g.heaps[t->g.rank] + t->offsets[b]), t->g.rank, b, t->buckets[b].count);
    CHECK(plx_reducer_ready(&t->reducer, b, t->offsets[b]) == PLX_OK);
    plx_reducer_poll(&t->reducer);
  }
}

/* A round of the reducer. */
static void gradients(struct thread *t) {
  CHECK(plx_reducer_ready(&t->reducer, NUM_BUCKETS, 0) == PLX_INVALID);
  plx_reducer_begin(&t->reducer);
  give(t, NUM_BUCKETS);
  CHECK(plx_reducer_finish(&t->reducer, &t->wait) == PLX_OK);
  for (uint32_t b = 0; b < NUM_BUCKETS; b++)
    CHECK(holds_sum(t, (int32_t *)(t->g.heaps[t->g.rank] + t->offsets[b]), b, t->buckets[b].count));
}

/* What a program does with an asynchronous all_reduce: another thread carries it out, while rounds of gradients go on.
 * Once "the other has gone further" was judged by this thread's late counter: a mismatch within four rounds. */
static void *carry_out(void *argument) {
  struct thread *t = argument;
  for (uint32_t i = 0; i < NUM_BESIDE; i++) {
    int32_t value = (int32_t)(t->g.rank + i), expected = 0;
    for (uint32_t r = 0; r < t->g.world; r++) expected += (int32_t)(r + i);
    while (atomic_load_explicit(&t->g.issued, memory_order_acquire) <= t->before + i) sched_yield();
    CHECK(plx_all_reduce(&t->g, &t->wait, &here, &value, &value, 1, PLX_I32, PLX_SUM, -1) == PLX_OK);
    CHECK(value == expected);
    plx_carried_out(&t->g);
  }
  return NULL;
}

static void gradients_beside(struct thread *t) {
  pthread_t lane;
  struct plx_wait wait = {.deadline_ns = t->wait.deadline_ns, .spin_ns = t->wait.spin_ns, .failed_rank = -1};
  t->before = atomic_load_explicit(&t->g.issued, memory_order_relaxed);
  CHECK(pthread_create(&lane, NULL, carry_out, t) == 0);
  for (uint32_t i = 0; i < NUM_BESIDE; i++) {
    if (i % 3 != 0) plx_issue(&t->g);
    plx_reducer_begin(&t->reducer);
    give(t, NUM_BUCKETS);
    if (i % 3 == 0) plx_issue(&t->g);
    CHECK(plx_reducer_finish(&t->reducer, &wait) == PLX_OK);
    for (uint32_t b = 0; b < NUM_BUCKETS; b++)
      CHECK(holds_sum(t, (int32_t *)(t->g.heaps[t->g.rank] + t->offsets[b]), b, t->buckets[b].count));
  }
  pthread_join(lane, NULL);
}

static void leave(struct plx_group *g) {
  struct plx_rank *me = plx_rank_of(g, g->rank);
  atomic_store_explicit(&me->life, PLX_LEFT, memory_order_release);
  plx_futex_wake_all(plx_low_half(&me->step));
}

/* The last to come to an oversubscribed sync opens it; here it dies between the two. Others once waited out their deadline. */
static void die_at_gate(struct plx_group *g, int counted) {
  atomic_store_explicit(&plx_rank_of(g, g->rank)->step, g->step + 1, memory_order_seq_cst);
  if (counted) atomic_fetch_add_explicit(&g->header->arrivals, 1, memory_order_acq_rel);
  leave(g);
}

/* Somebody ends the group at any time. Whoever got its result got the right one, though others may know already that it
 * is over, and call on with other values. */
static void go_on(struct thread *t) {
  struct plx_group *g = &t->g;
  int code = PLX_OK;
  for (t->operation = 1; code == PLX_OK; t->operation++) {
    size_t n = t->operation % 3 == 0 ? MOST : 1500;
    fill(t, t->in, g->rank, 0, n);
    code = plx_all_reduce(g, &t->wait, &here, t->in, t->out, n, PLX_I32, PLX_SUM, -1);
    CHECK(code != PLX_OK || holds_sum(t, t->out, 0, n));
  }
  memset(t->in, 0xff, MOST * 4);
  for (int again = 0; again < 3; again++) {
    CHECK(code == PLX_INTERRUPTED);
    code = plx_all_reduce(g, &t->wait, &here, t->in, t->out, again == 0 ? MOST : 1500, PLX_I32, PLX_SUM, -1);
  }
}

/* What everybody but `odd` learns when the group ends, and that nothing was written. */
static void end(struct thread *t) {
  struct plx_group *g = &t->g;
  uint32_t odd = draw(t, g->world);
  size_t n = draw_size(t);
  int code;
  CHECK(plx_barrier(g, &t->wait, &here) == PLX_OK);
  fill(t, t->in, g->rank, 0, n);
  if (t->ending == NEVER_COME) t->wait.deadline_ns = plx_now_ns() + 150000000ull;
  int round = t->ending == POISON_ROUND || t->ending == LEAVE_ROUND;
  if (round) plx_reducer_begin(&t->reducer);
  if (round) give(t, g->rank == odd ? draw(t, NUM_BUCKETS) : NUM_BUCKETS);
  if (g->rank == odd && t->ending == NEVER_COME) return;
  if (t->ending == DIE_AT_SYNC) {
    if (g->rank == odd) {
      plx_publish(g, &(struct plx_call){.seq = g->seq + 1, .kind = PLX_BARRIER, .root = -1});
      die_at_gate(g, n % 2 == 0);
      return;
    }
    CHECK(plx_barrier(g, &t->wait, &here) == PLX_OK); /* it came */
  }
  if (g->rank == odd && (t->ending == POISON || t->ending == POISON_ROUND)) {
    CHECK(plx_poison(g, PLX_INTERRUPTED, odd) == PLX_INTERRUPTED);
    return;
  }
  if (g->rank == odd && (t->ending == LEAVE || t->ending == LEAVE_ROUND)) {
    leave(g);
    return;
  }
  /* A receive that nobody will ever answer ends with the group. */
  struct plx_receive never = {.data = t->out, .bytes = 4, .deadline_ns = UINT64_MAX, .src = -1, .tag = 1, .dtype = PLX_I32};
  plx_post(g, &here, &never);
  if (round)
    code = plx_reducer_finish(&t->reducer, &t->wait);
  else if (g->rank == odd && t->ending == CALL_ANOTHER)
    code = plx_broadcast(g, &t->wait, &here, t->in, 4 * n, PLX_I32, (int)draw(t, g->world));
  else
    code = plx_all_reduce(g, &t->wait, &here, t->in, t->in, n, PLX_I32, PLX_SUM, -1);
  static const int expected[NUM_ENDINGS] = {PLX_OK,       PLX_DEADLINE,    PLX_INTERRUPTED, PLX_PEER_LOST,
                                            PLX_MISMATCH, PLX_INTERRUPTED, PLX_PEER_LOST, PLX_PEER_LOST, PLX_INTERRUPTED};
  CHECK(code == expected[t->ending]);
  CHECK(holds(t, t->in, g->rank, 0, n));
  CHECK(plx_barrier(g, &t->wait, &here) == expected[t->ending]); /* it stays over */
  while (atomic_load_explicit(&never.status, memory_order_acquire) == PLX_PENDING) {
    struct plx_wait patient = {.deadline_ns = UINT64_MAX, .spin_ns = t->wait.spin_ns};
    plx_progress(g, &patient, &never);
  }
  CHECK(atomic_load(&never.status) == expected[t->ending]);
}

static void *run(void *argument) {
  struct thread *t = argument;
  static void (*const operations[])(struct thread *) = {all_reduce, all_reduce, reduce_scatter, gather,  broadcast, broadcast_buffers,
                                                        scatter,    all_to_all, pass_on,        hear_everybody, barrier,
                                                        gradients,  gradients,  exchange,       gradients_beside};
  for (t->operation = 1; t->operation <= t->operations; t->operation++)
    operations[draw(t, sizeof operations / sizeof *operations)](t);
  CHECK(plx_close_phase(&t->g, &t->wait) == PLX_OK);
  if (t->ending == ANY_TIME)
    go_on(t);
  else if (t->ending != FINISH)
    end(t);
  return NULL;
}

static void *make_progress(void *argument) {
  struct thread *t = argument;
  while (!atomic_load(&t->over)) plx_progress_thread(&t->g);
  return NULL;
}

struct reader {
  struct thread *threads;
  uint64_t read;
  _Atomic int over;
};

/* As the agent does from outside: whatever the ranks do meanwhile, a record is whole or it is skipped. */
static void *read_records(void *argument) {
  struct reader *reader = argument;
  struct thread *t = &reader->threads[0];
  while (!atomic_load(&reader->over)) {
    for (uint32_t r = 0; r < t->g.world; r++) {
      struct plx_rank *owner = plx_rank_of(&t->g, r);
      uint64_t end = atomic_load_explicit(&owner->next_record, memory_order_acquire);
      for (uint64_t at = end > PLX_RECORDS ? end - PLX_RECORDS : 0; at < end; at++) {
        struct plx_record copy;
        if (!plx_record_read(owner, at, &copy)) continue;
        CHECK(copy.kind >= PLX_BARRIER && copy.kind < PLX_NUM_KINDS && copy.enter_ns != 0 && copy.ndim == 0);
        CHECK((copy.peer >= 0) <= (copy.kind == PLX_SEND || copy.kind == PLX_RECV));
        CHECK(copy.status <= PLX_CLOSED);
        reader->read++;
      }
    }
    sched_yield();
  }
  return NULL;
}

static void stress(uint32_t world, int oversubscribed, enum ending ending, uint32_t operations, uint64_t seed) {
  size_t bytes = plx_group_bytes(world, STAGE, CHANNEL), heaps_bytes = (size_t)world * HEAP;
  void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  unsigned char *heaps = mmap(NULL, heaps_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED || heaps == MAP_FAILED || plx_group_format(base, world, STAGE, CHANNEL, oversubscribed) != PLX_OK ||
      plx_group_check(base, bytes) != PLX_OK) {
    perror("stress: no memory");
    exit(1);
  }
  struct thread *threads = calloc(world, sizeof *threads);
  for (uint32_t r = 0; r < world; r++) {
    struct thread *t = &threads[r];
    struct plx_header *header = base;
    t->g = (struct plx_group){.base = base, .header = header, .rank = r, .world = world, .oversubscribed = oversubscribed,
                              .stage_bytes = header->stage_bytes, .spin_ns = 20000, .heap_bytes = HEAP};
    t->g.pidfds = malloc(world * sizeof *t->g.pidfds);
    t->g.heaps = malloc(world * sizeof *t->g.heaps);
    t->g.mailbox = plx_mailbox_open(world);
    for (uint32_t p = 0; p < world; p++) {
      t->g.pidfds[p] = -1;
      t->g.heaps[p] = heaps + (size_t)p * HEAP;
    }
    t->wait = (struct plx_wait){.deadline_ns = plx_now_ns() + 100000000000ull, .spin_ns = t->g.spin_ns, .failed_rank = -1};
    t->random = seed;
    t->operations = operations;
    t->ending = ending;
    t->in = malloc(MOST * 4 * world);
    t->out = malloc(MOST * 4 * world);
    static const uint64_t counts[NUM_BUCKETS] = {1, 17, 1000, 4097, 9999};
    for (uint64_t b = 0, at = BUCKETS + 128 * r; b < NUM_BUCKETS; at += (4 * counts[b] + 63) / 64 * 64, b++)
      t->buckets[b] = (struct plx_bucket){counts[b], 4, plx_reduce_kernel(PLX_I32, PLX_SUM), 0, 1, 0, 0}, t->offsets[b] = at;
    t->reducer = (struct plx_reducer){.g = &t->g, .flags = FLAGS, .num_buckets = NUM_BUCKETS, .buckets = t->buckets};
  }
  struct reader reader = {.threads = threads};
  pthread_t reading;
  int failed = pthread_create(&reading, NULL, read_records, &reader);
  for (uint32_t r = 0; r < world; r++) {
    failed |= pthread_create(&threads[r].progress, NULL, make_progress, &threads[r]);
    failed |= pthread_create(&threads[r].id, NULL, run, &threads[r]);
  }
  if (failed != 0) {
    perror("stress: no thread");
    exit(1);
  }
  if (ending == ANY_TIME) {
    struct plx_group outside = {.base = base, .header = base, .world = world};
    struct timespec moment = {0, (long)(5000000 + seed % 7 * 1300000)};
    nanosleep(&moment, NULL);
    plx_poison(&outside, PLX_INTERRUPTED, 0);
  }
  for (uint32_t r = 0; r < world; r++) pthread_join(threads[r].id, NULL);
  for (uint32_t r = 0; r < world; r++) {
    atomic_store(&threads[r].over, 1);
    plx_stop_progress_thread(&threads[r].g);
    pthread_join(threads[r].progress, NULL);
  }
  atomic_store(&reader.over, 1);
  pthread_join(reading, NULL);
  for (uint32_t r = 0; r < world; r++) {
    struct thread *t = &threads[r];
    plx_mailbox_close(t->g.mailbox, world);
    free(t->g.pidfds);
    free(t->g.heaps);
    free(t->in);
    free(t->out);
  }
  free(threads);
  munmap(base, bytes);
  munmap(heaps, heaps_bytes);
}

/* Every kernel on bytes of any kind, for what the sanitizers say; the values are compared in tests/backend. */
static void kernels(uint64_t seed) {
  static _Alignas(16) unsigned char bytes[3][16 * 1030], out[16 * 1030];
  const void *src[3] = {bytes[0], bytes[1], bytes[2]};
  struct thread random = {.random = seed};
  for (uint32_t i = 0; i < sizeof bytes; i++) bytes[i / sizeof bytes[0]][i % sizeof bytes[0]] = (unsigned char)draw(&random, 256);
  for (int dtype = -1; dtype <= PLX_NUM_DTYPES; dtype++)
    for (int redop = -1; redop <= PLX_NUM_REDOPS; redop++) {
      plx_reduce_fn kernel = plx_reduce_kernel(dtype, redop);
      if (kernel == NULL) continue;
      for (uint32_t n = 1; n <= 3; n++)
        for (size_t count = 0; count <= 1030; count += count < 20 ? 1 : 505) kernel(out, src, n, count);
    }
}

/* Every alignment of both sides, around the lengths at which the way changes; what lies beside stays as it was. */
static void copies(void (*copy)(void *to, const void *from, size_t n)) {
  enum { ROOM = 40000 + 256 };
  static const size_t sizes[] = {0, 1, 63, 64, 65, 4097, 12287, 12288, 12289, 12288 + 63, 12288 + 64, 40000};
  unsigned char *from = malloc(ROOM), *to = malloc(ROOM), *expected = malloc(ROOM);
  for (size_t i = 0; i < ROOM; i++) from[i] = (unsigned char)(i * 31 + i / 251);
  for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
    for (size_t to_at = 0; to_at <= 64; to_at++)
      for (size_t from_at = to_at % 3; from_at <= 64; from_at += 21) {
        memset(to, 0xee, ROOM);
        memset(expected, 0xee, ROOM);
        memcpy(expected + to_at, from + from_at, sizes[s]);
        copy(to + to_at, from + from_at, sizes[s]);
        if (memcmp(to, expected, ROOM) != 0) {
          fprintf(stderr, "stress: a copy of %zu bytes from offset %zu to offset %zu is wrong\n", sizes[s], from_at, to_at);
          exit(1);
        }
      }
  free(from);
  free(to);
  free(expected);
}

int main(int argc, char **argv) {
  uint32_t operations = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 120;
  uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
  kernels(seed);
  copies(plx_copy);
  copies(plx_copy_by_stores); /* on this processor, too */
  for (uint32_t world = 2; world <= MAX_WORLD; world++)
    for (int oversubscribed = 0; oversubscribed <= 1; oversubscribed++) {
      stress(world, oversubscribed, FINISH, operations, seed + world);
      for (int ending = NEVER_COME; ending < NUM_ENDINGS; ending++)
        for (uint32_t again = 0; again < 3; again++) stress(world, oversubscribed, (enum ending)ending, ending == ANY_TIME ? 0 : 3, seed + again);
    }
  printf("stress: %u operations in each of 8 groups, and %d groups that ended, as they should.\n", operations,
         (NUM_ENDINGS - 1) * 3 * 8);
  return 0;
}
