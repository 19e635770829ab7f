/* Every order in which the threads of some ranks can run the core's own code, for short programs of theirs.
 *
 *   rank 0   program   A  R  B           A: an asynchronous all_reduce, which the lane carries out
 *            lane         a              R, S: a round of gradients on the first, the second reducer
 *   rank 1   program   A  R  B           B: a barrier, for which the program waits
 *            lane         a              C, D: rank 0's, rank 1's value for all, for which that rank does
 *                                        not wait
 *
 * The sources of csrc are compiled with points.h, which makes each of their atomic operations a point where another
 * thread may go on. From each state every thread that can run makes one step; a state that was seen before is not
 * explored again. A state is the ranks' memory and the stacks of their threads, so nothing is modelled: what runs is the
 * code that trains.
 *
 * What must hold, whatever the order:
 *
 *   all programs the same           every operation returns PLX_OK, with the right values; nobody waits for ever
 *   other collectives, or rounds    some rank hears PLX_MISMATCH or PLX_PEER_LOST; nobody waits for ever. But for a C
 *                                   that is a rank's last collective: nobody asks whether the others have made it
 *   the same, in another order      either of the two, and nobody waits for ever: A R beside R A need not be noticed
 *   a rank dies at any point        the others hear PLX_PEER_LOST, or were through; nobody waits for ever
 *
 * Waiting for ever: all threads that are left have looked at everything since the last change, and go on waiting.
 *
 * Usage: explore [-c] [-d] [-pN] [-rN] PROGRAM...     one program per rank
 *        explore [options] -aN -nP                         all programs of up to N calls, for P ranks
 *   -c    more ranks than cores (the oversubscribed sync)       -d   rank 0 may die
 *   -pN   only schedules in which a thread that could go on is interrupted N times or less
 *   -rN   instead of all schedules, N that are drawn at random
 * Exit code 0: it holds. 1: it does not, and the schedule that shows it is printed.
 */
#include <stdio.h>
#include <ucontext.h>

#include "collectives.h"
#include "early.h"
#include "recorder.h"
#include "reducer.h"

#undef calloc
#undef free

#if defined(__x86_64__)
#define STACK_POINTER(context) ((context).uc_mcontext.gregs[REG_RSP])
#define REGISTERS(context) ((context).uc_mcontext.gregs)
#elif defined(__aarch64__)
#define STACK_POINTER(context) ((context).uc_mcontext.sp)
#define REGISTERS(context) ((context).uc_mcontext.regs)
#endif

enum { MOST_RANKS = 3, NUM_THREADS = 2 * MOST_RANKS, STACK = 16384, MOST_OPS = 8, NUM_REDUCERS = 2, HEAP = 4096 };
enum { STAGE_BYTES = 4096, CHANNEL_BYTES = 4096 };
enum { FLAGS_AT = 0, VALUES_AT = 2048 };

struct thread {
  ucontext_t context;
  int started, over;
  int asleep;  /* it has looked at everything, and nothing has changed since */
  int changed; /* somebody has written, it or another, since it last went to sleep */
  unsigned char scratch[256];
  _Alignas(64) unsigned char stack[STACK];
};

struct process {
  struct plx_group g;
  struct plx_reducer reducers[NUM_REDUCERS];
  struct plx_bucket buckets[NUM_REDUCERS];
  unsigned char *heaps[MOST_RANKS];
  int pidfds[MOST_RANKS];
  const char *program;
  int at; /* of the program */
  char queue[MOST_OPS];
  int queued, taken, closing;
  int32_t reduced; /* how many all_reduces have been carried out */
  int32_t copied;  /* and how many broadcasts of one rank's value */
  int code;     /* the first that was not PLX_OK */
  int dead;
};

/* All that a state consists of, besides the shared memory. */
static struct {
  struct thread threads[NUM_THREADS];
  struct process processes[MOST_RANKS];
} now;

static unsigned char *shared, *heaps[MOST_RANKS];
static size_t shared_bytes;
static uint32_t world;
static int oversubscribed, may_die, running, most_preemptions = -1;
static ucontext_t explorer;
static const char *programs[MOST_RANKS];
static enum verdict { SAME, REORDERED, DIFFERENT } verdict;
static const struct plx_origin origin; /* of every call */

static _Noreturn void fail(const char *what);

/* ---- what points.h asks for ---- */

/* What only decides who is woken up: here whoever sleeps looks around after any change. */
int explore_wakes_only(const volatile void *word) {
  for (uint32_t r = 0; r < world; r++) {
    const struct plx_group *g = &now.processes[r].g;
    if (word == &plx_rank_of(g, r)->sleepers || word == &g->header->sync_sleepers || word == &plx_rank_of(g, r)->bell) return 1;
    for (int b = 0; b < NUM_REDUCERS; b++) {
      struct plx_flags *bell = (struct plx_flags *)(heaps[r] + now.processes[r].reducers[b].flags) + 1;
      if (word == &bell->done || word == &bell->ready) return 1;
    }
  }
  return 0;
}

/* Read and written by one thread: a rank's own flags, which others only read; so only its stores are points. */
static int is_own(const volatile void *word) {
  const struct plx_rank *me = plx_rank_of(&now.processes[running / 2].g, (uint32_t)running / 2);
  return word == &me->finished;
}

void explore_point(const volatile void *word) {
  if (running < 0 || explore_wakes_only(word) || is_own(word)) return;
  /* Where nothing may fail, the group is never over: a store of this word ends the exploration. */
  if (verdict == SAME && !may_die && word == &((struct plx_header *)shared)->poison) return;
  swapcontext(&now.threads[running].context, &explorer);
}

/* Nobody else writes a rank's flags: what it reads there itself cannot have changed. */
void explore_look(const volatile void *word) {
  if (running < 0) return;
  const unsigned char *at = (const unsigned char *)(uintptr_t)word, *own = heaps[running / 2];
  if (at < own || at >= own + HEAP) explore_point(word);
}

void explore_changed(const volatile void *word) {
  if (running < 0 || explore_wakes_only(word)) return;
  for (int t = 0; t < NUM_THREADS; t++)
    now.threads[t].changed = 1, now.threads[t].asleep = 0;
}

/* Who sleeps looks around after a while, whoever wakes it or not. So sleeping ends when anything has changed, and only
 * who has looked at everything without a change sleeps. */
void explore_sleep(void) {
  struct thread *t = &now.threads[running];
  t->asleep = !t->changed;
  t->changed = 0;
  explore_point(NULL);
}

int explore_is_dead(int rank) {
  explore_point(NULL);
  return now.processes[rank].dead;
}

void *explore_scratch(size_t bytes) {
  unsigned char *scratch = now.threads[running].scratch;
  if (bytes > sizeof now.threads[running].scratch) fail("scratch");
  memset(scratch, 0, bytes);
  return scratch;
}

/* The flight recorder tells what happened, and changes nothing. */
struct plx_record *plx_record_enter(struct plx_group *g, const struct plx_call *call, const struct plx_origin *o,
                                    int32_t peer) {
  (void)call, (void)o, (void)peer;
  return &g->unseen;
}
void plx_record_leave(struct plx_group *g, struct plx_record *record, int status) { (void)g, (void)record, (void)status; }
void plx_record_leave_late(struct plx_group *g, struct plx_record *record, uint64_t recorded, int status) {
  (void)recorded;
  plx_record_leave(g, record, status);
}

/* One sum is all that is reduced. */
static void sum(void *dst, const void *const *src, uint32_t n, size_t count) {
  for (size_t i = 0; i < count; i++) {
    int32_t total = 0;
    for (uint32_t r = 0; r < n; r++) total += ((const int32_t *)src[r])[i];
    ((int32_t *)dst)[i] = total;
  }
}
plx_reduce_fn plx_reduce_kernel(int dtype, int redop) { return dtype == PLX_I32 && redop == PLX_SUM ? sum : NULL; }
size_t plx_dtype_size(int dtype) { return dtype == PLX_I32 ? 4 : 1; }

/* ---- a rank's program, as py_*.c and the backend's Python carry it out ---- */

static void note(struct process *p, int code) {
  if (code != PLX_OK && p->code == PLX_OK) p->code = code;
}

static int all_reduce(struct process *p, struct plx_wait *w) {
  int32_t value = (int32_t)p->g.rank + 1 + 10 * p->reduced, expected = 0;
  for (uint32_t r = 0; r < world; r++) expected += (int32_t)r + 1 + 10 * p->reduced;
  int code = plx_all_reduce(&p->g, w, &origin, &value, &value, 1, PLX_I32, PLX_SUM, -1);
  if (code == PLX_OK && value != expected) fail("a wrong sum");
  p->reduced += code == PLX_OK;
  return code;
}

static int barrier(struct process *p, struct plx_wait *w) { return plx_barrier(&p->g, w, &origin); }

static int copy(struct process *p, struct plx_wait *w, uint32_t root) {
  int32_t expected = (int32_t)root + 1 + 10 * p->copied, value = p->g.rank == root ? expected : 0;
  int code = plx_broadcast_buffers(&p->g, w, &origin, &value, sizeof value, NULL, PLX_I32, (int)root, (uint64_t)p->copied);
  if (code == PLX_OK && value != expected) fail("a wrong copy");
  p->copied += code == PLX_OK;
  return code;
}

static int is_idle(struct process *p) { return !plx_is_behind(&p->g); }

static void drain(struct process *p) {
  while (!is_idle(p)) explore_sleep();
}

static int round_of_gradients(struct process *p, struct plx_wait *w, int number) {
  struct plx_reducer *b = &p->reducers[number];
  int32_t *value = (int32_t *)(heaps[p->g.rank] + VALUES_AT + 64 * number), expected = 0;
  plx_reducer_begin(b);
  *value = (int32_t)p->g.rank + 1 + 100 * (int32_t)b->round;
  for (uint32_t r = 0; r < world; r++) expected += (int32_t)r + 1 + 100 * (int32_t)b->round;
  if (plx_reducer_ready(b, 0, VALUES_AT + 64 * (uint64_t)number) != PLX_OK) fail("no bucket");
  plx_reducer_poll(b);
  int code = plx_reducer_finish(b, w);
  if (code == PLX_OK && *value != expected) fail("a wrong mean");
  return code;
}

static void run_program(int rank) {
  struct process *p = &now.processes[rank];
  struct plx_wait w = {.deadline_ns = UINT64_MAX, .failed_rank = -1};
  for (; p->program[p->at] != 0 && p->code == PLX_OK; p->at++) {
    char op = p->program[p->at];
    if (op == 'A') {
      plx_issue(&p->g);
      explore_point(NULL);
      p->queue[p->queued++] = op;
      explore_changed(p->queue);
    } else if (op == 'W') {
      drain(p);
    } else if (strchr("BCD", op) != NULL) {
      drain(p);
      if (p->code == PLX_OK) note(p, op == 'B' ? barrier(p, &w) : copy(p, &w, op == 'D'));
    } else {
      note(p, round_of_gradients(p, &w, op == 'S'));
    }
  }
  explore_point(NULL);
  p->closing = 1;
  explore_changed(&p->closing);
  drain(p);
  atomic_store_explicit(&plx_rank_of(&p->g, p->g.rank)->life, PLX_LEFT, memory_order_release);
}

static void run_lane(int rank) {
  struct process *p = &now.processes[rank];
  struct plx_wait w = {.deadline_ns = UINT64_MAX, .failed_rank = -1};
  for (;;) {
    explore_point(NULL);
    if (p->taken < p->queued) {
      p->taken++;
      note(p, all_reduce(p, &w));
      plx_carried_out(&p->g);
    } else if (p->closing) {
      return;
    } else {
      explore_sleep();
    }
  }
}

static void run_thread(int t) {
  (t % 2 == 0 ? run_program : run_lane)(t / 2);
  now.threads[t].over = 1;
  explore_changed(&now.threads[t].over);
  for (;;) swapcontext(&now.threads[t].context, &explorer);
}

/* ---- states ---- */

struct piece {
  unsigned char *at;
  size_t bytes;
};

/* Of a thread's stack only what is above its stack pointer means anything. */
static struct piece stack_of(struct thread *t) {
  unsigned char *top = (unsigned char *)(uintptr_t)STACK_POINTER(t->context) - 128; /* and the red zone */
  if (!t->started || top < t->stack || top > t->stack + STACK) top = t->stack;
  return (struct piece){top, (size_t)(t->stack + STACK - top)};
}

static size_t list_memory(struct piece *list) {
  size_t n = 0;
  list[n++] = (struct piece){shared, sizeof(struct plx_header)};
  for (uint32_t r = 0; r < world; r++) {
    const struct plx_group *g = &now.processes[r].g;
    struct plx_rank *rank = plx_rank_of(g, r);
    list[n++] = (struct piece){(unsigned char *)rank, offsetof(struct plx_rank, records)};
    for (uint64_t phase = 0; phase < 2; phase++)
      list[n++] = (struct piece){(unsigned char *)rank + (sizeof(struct plx_rank) + 4095) / 4096 * 4096 + phase * STAGE_BYTES, 64};
    list[n++] = (struct piece){heaps[r] + FLAGS_AT, 2 * NUM_REDUCERS * sizeof(struct plx_flags)};
    list[n++] = (struct piece){heaps[r] + VALUES_AT, 64 * NUM_REDUCERS};
  }
  list[n++] = (struct piece){(unsigned char *)now.processes, world * sizeof(struct process)};
  return n;
}

static uint64_t mix(uint64_t hash, const unsigned char *at, size_t bytes) {
  for (; bytes >= 8; at += 8, bytes -= 8) {
    uint64_t word;
    memcpy(&word, at, 8);
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 29;
  }
  for (; bytes != 0; at++, bytes--) hash = (hash ^ *at) * 0x100000001b3ull;
  return hash;
}

static uint64_t hash_state(void) {
  struct piece list[64];
  size_t n = list_memory(list);
  uint64_t hash = 0xcbf29ce484222325ull;
  for (size_t i = 0; i < n; i++) hash = mix(hash, list[i].at, list[i].bytes);
  for (uint32_t t = 0; t < 2 * world; t++) {
    struct thread *thread = &now.threads[t];
    uint64_t flags = (uint64_t)(thread->over | thread->asleep << 1 | thread->changed << 2);
    hash = mix(hash, (unsigned char *)&flags, sizeof flags);
    if (!thread->over) {
      struct piece stack = stack_of(thread);
      hash = mix(hash, (unsigned char *)&REGISTERS(thread->context), sizeof REGISTERS(thread->context));
      hash = mix(hash, stack.at, stack.bytes);
    }
  }
  return hash;
}

struct state {
  unsigned char *copy;
  size_t bytes;
  uint32_t next;   /* the thread to try next */
  int previous;    /* the thread that ran last */
  int preemptions; /* how often another took over from one that could have gone on */
};

static struct state *path;
static size_t depth, room;

static void keep(struct state *s) {
  struct piece list[64 + NUM_THREADS];
  size_t n = list_memory(list), bytes = 0;
  for (uint32_t t = 0; t < 2 * world; t++) {
    list[n++] = (struct piece){(unsigned char *)&now.threads[t], offsetof(struct thread, stack)};
    list[n++] = stack_of(&now.threads[t]);
  }
  for (size_t i = 0; i < n; i++) bytes += list[i].bytes;
  s->copy = malloc(bytes);
  s->bytes = bytes;
  if (s->copy == NULL) fail("no memory");
  unsigned char *to = s->copy;
  for (size_t i = 0; i < n; i++) memcpy(to, list[i].at, list[i].bytes), to += list[i].bytes;
}

static void restore(const struct state *s) {
  struct piece list[64];
  size_t n = list_memory(list);
  const unsigned char *from = s->copy;
  for (size_t i = 0; i < n; i++) memcpy(list[i].at, from, list[i].bytes), from += list[i].bytes;
  for (uint32_t t = 0; t < 2 * world; t++) {
    memcpy(&now.threads[t], from, offsetof(struct thread, stack));
    from += offsetof(struct thread, stack);
    struct piece stack = stack_of(&now.threads[t]);
    memcpy(stack.at, from, stack.bytes);
    from += stack.bytes;
  }
}

/* A set of the states that were seen, by their hash. */
static uint64_t *seen;
static size_t num_seen, seen_room;

static int is_new(uint64_t hash) {
  if (hash == 0) hash = 1;
  if (2 * num_seen >= seen_room) {
    uint64_t *old = seen;
    size_t old_room = seen_room;
    seen_room = seen_room == 0 ? 1 << 16 : 2 * seen_room;
    seen = calloc(seen_room, sizeof *seen);
    if (seen == NULL) fail("no memory");
    num_seen = 0;
    for (size_t i = 0; i < old_room; i++)
      if (old[i] != 0) is_new(old[i]);
    free(old);
  }
  size_t at = hash & (seen_room - 1);
  for (; seen[at] != 0; at = (at + 1) & (seen_room - 1))
    if (seen[at] == hash) return 0;
  seen[at] = hash;
  num_seen++;
  return 1;
}

/* ---- exploring ---- */

static void tell(void) {
  for (uint32_t r = 0; r < world; r++) {
    const struct process *p = &now.processes[r];
    fprintf(stderr, "  rank %u: program %s at %d%s%s, lane %d of %d, %llu syncs, code %d\n", r, p->program, p->at,
            now.threads[2 * r].over ? " (over)" : now.threads[2 * r].asleep ? " (waits)" : "", p->dead ? " (dead)" : "", p->taken,
            p->queued, (unsigned long long)plx_rank_of(&p->g, r)->step, p->code);
  }
}

static void fail(const char *what) {
  running = -1;
  fprintf(stderr, "explore%s%s", oversubscribed ? " -c" : "", may_die ? " -d" : "");
  for (uint32_t r = 0; r < world; r++) fprintf(stderr, " %s", programs[r]);
  fprintf(stderr, ": %s, after %zu states. The threads in the order in which they ran (2r: program of rank r, 2r+1: lane):\n  ", what,
          num_seen);
  for (size_t i = 0; i + 1 <= depth; i++) fprintf(stderr, "%d ", (int)path[i].next - 1);
  fprintf(stderr, "\n");
  tell();
  exit(1);
}

static void prepare(int number) {
  struct thread *t = &now.threads[number];
  t->changed = t->started = 1;
  getcontext(&t->context);
  t->context.uc_stack.ss_sp = t->stack;
  t->context.uc_stack.ss_size = STACK;
  makecontext(&t->context, (void (*)(void))run_thread, 1, number);
}

static void begin(void) {
  memset(&now, 0, sizeof now);
  memset(shared, 0, shared_bytes);
  if (plx_group_format(shared, world, STAGE_BYTES, CHANNEL_BYTES, oversubscribed) != PLX_OK) fail("no group");
  for (uint32_t r = 0; r < world; r++) {
    struct process *p = &now.processes[r];
    memset(heaps[r], 0, HEAP);
    p->g = (struct plx_group){.base = shared, .header = (struct plx_header *)shared, .rank = r, .world = world,
                              .stage_bytes = STAGE_BYTES, .oversubscribed = oversubscribed, .heap_bytes = HEAP};
    p->g.heaps = p->heaps;
    p->g.pidfds = p->pidfds;
    for (uint32_t q = 0; q < world; q++) p->heaps[q] = heaps[q], p->pidfds[q] = (int)q;
    for (int b = 0; b < NUM_REDUCERS; b++) {
      p->buckets[b] = (struct plx_bucket){1, 4, plx_reduce_kernel(PLX_I32, PLX_SUM), 0, 1, 0, 0};
      p->reducers[b] = (struct plx_reducer){.g = &p->g, .flags = FLAGS_AT + (uint64_t)b * 2 * sizeof(struct plx_flags), .num_buckets = 1,
                                        .buckets = &p->buckets[b]};
    }
    p->program = programs[r];
    prepare((int)(2 * r));
    if (strchr(programs[r], 'A') != NULL) prepare((int)(2 * r + 1));
    else now.threads[2 * r + 1].over = 1;
  }
}

static int count(const char *program, const char *kinds) {
  int n = 0;
  for (; *program != 0; program++) n += strchr(kinds, *program) != NULL;
  return n;
}

/* Behind this, a program has no collective but C's and D's. */
static const char *find_last_asked(const char *program) {
  const char *end = program;
  for (const char *at = program; *at != 0; at++)
    if (*at == 'A' || *at == 'B') end = at + 1;
  return end;
}

/* Whether all that the programs differ in are C's and D's of which nobody asks whether all have made them: the last ones. */
static int differ_in_last_copies_only(void) {
  for (uint32_t r = 1; r < world; r++) {
    const char *a = programs[0], *b = programs[r], *end_a = find_last_asked(a), *end_b = find_last_asked(b);
    for (;; a++, b++) {
      while (a != end_a && strchr("RS", *a) != NULL) a++;
      while (b != end_b && strchr("RS", *b) != NULL) b++;
      if (a == end_a || b == end_b) break;
      if (*a != *b) return 0;
    }
    if (a != end_a || b != end_b || count(programs[0], "R") != count(programs[r], "R") ||
        count(programs[0], "S") != count(programs[r], "S"))
      return 0;
  }
  return 1;
}

/* Whether `a` and `b` hold the same of `kinds`, in the same order. */
static int agree(const char *a, const char *b, const char *kinds) {
  for (;; a++, b++) {
    while (*a != 0 && strchr(kinds, *a) == NULL) a++;
    while (*b != 0 && strchr(kinds, *b) == NULL) b++;
    if (*a == 0 || *b == 0) return *a == *b;
    if (*a != *b) return 0;
  }
}

static enum verdict compare(void) {
  enum verdict found = SAME;
  for (uint32_t r = 1; r < world; r++) {
    if (!agree(programs[0], programs[r], "ABCD") || count(programs[0], "R") != count(programs[r], "R") ||
        count(programs[0], "S") != count(programs[r], "S"))
      return DIFFERENT;
    if (!agree(programs[0], programs[r], "ABCDRS")) found = REORDERED;
  }
  return found;
}

static void judge_end(void) {
  int failed = 0, dead = 0;
  for (uint32_t r = 0; r < world; r++) failed += now.processes[r].code != PLX_OK, dead += now.processes[r].dead;
  if (dead) {
    for (uint32_t r = 0; r < world; r++)
      if (now.processes[r].code != PLX_OK && now.processes[r].code != PLX_PEER_LOST &&
          (verdict == SAME || now.processes[r].code != PLX_MISMATCH))
        fail("a death is told as something else");
    return;
  }
  if (verdict == SAME && failed) fail("a false alarm");
  if (verdict == DIFFERENT && !failed && !differ_in_last_copies_only()) fail("ranks did different things unheard");
  for (uint32_t r = 0; r < world; r++)
    if (now.processes[r].code != PLX_OK && now.processes[r].code != PLX_MISMATCH && now.processes[r].code != PLX_PEER_LOST)
      fail("another error");
}

static int can_run(uint32_t t) {
  const struct thread *thread = &now.threads[t];
  return !thread->over && !thread->asleep && !now.processes[t / 2].dead;
}

static void enter_state(int previous, int preemptions) {
  uint64_t hash = hash_state();
  if (most_preemptions >= 0) hash = (hash ^ (uint64_t)(previous + 1 + 16 * preemptions)) * 0x9e3779b97f4a7c15ull;
  if (!is_new(hash)) return;
  if (depth == room) path = realloc(path, (room = 2 * room + 64) * sizeof *path);
  int left = 0, runnable = 0;
  for (uint32_t t = 0; t < 2 * world; t++) {
    left += !now.threads[t].over && !now.processes[t / 2].dead;
    runnable += can_run(t);
    if (verdict == SAME && !may_die && now.processes[t / 2].code != PLX_OK) fail("a false alarm");
  }
  if (left == 0) {
    judge_end();
    return;
  }
  if (runnable == 0) fail("all wait for ever");
  path[depth].next = 0;
  path[depth].previous = previous;
  path[depth].preemptions = preemptions;
  keep(&path[depth]);
  depth++;
}

static uint64_t explore(void) {
  verdict = compare();
  num_seen = 0;
  if (seen != NULL) memset(seen, 0, seen_room * sizeof *seen);
  depth = 0;
  running = -1;
  begin();
  enter_state(-1, 0);
  while (depth != 0) {
    struct state *s = &path[depth - 1];
    uint32_t dying = 2 * world; /* after the threads, one more choice: rank 0 dies here */
    int ran = 0, preemptions = 0;
    while (s->next <= dying && !ran) {
      uint32_t t = s->next++;
      restore(s);
      preemptions = s->preemptions + (s->previous >= 0 && (int)t != s->previous && (uint32_t)s->previous < dying && can_run((uint32_t)s->previous));
      if (most_preemptions >= 0 && preemptions > most_preemptions && t != dying) continue;
      if (t == dying) {
        if (!may_die || now.processes[0].dead || now.threads[0].over) continue;
        preemptions = s->preemptions;
        now.processes[0].dead = 1;
        for (int i = 0; i < NUM_THREADS; i++) now.threads[i].changed = 1, now.threads[i].asleep = 0;
      } else {
        if (!can_run(t)) continue;
        running = (int)t;
        swapcontext(&explorer, &now.threads[t].context);
        running = -1;
      }
      ran = 1;
    }
    if (ran) {
      enter_state((int)s->next - 1, preemptions);
      continue;
    }
    free(s->copy);
    depth--;
  }
  return num_seen;
}

/* As many schedules as asked for, drawn at random: for programs of which there are too many to take each. */
static uint64_t draw(uint64_t *random) {
  *random = *random * 6364136223846793005ull + 1442695040888963407ull;
  return *random >> 33;
}

static void sample(uint64_t schedules) {
  verdict = compare();
  for (uint64_t seed = 1; seed <= schedules; seed++) {
    uint64_t random = seed, stay = draw(&random) % 16; /* some schedules switch at every point, some seldom */
    int t = 0, left = 1, over = 0;
    begin();
    while (left != 0) {
      left = 0;
      int runnable = 0;
      for (uint32_t i = 0; i < 2 * world; i++) {
        left += !now.threads[i].over && !now.processes[i / 2].dead;
        runnable += can_run(i);
        if (verdict == SAME && !may_die && now.processes[i / 2].code != PLX_OK) fail("a false alarm");
      }
      if (left == 0) break;
      if (runnable == 0) fail("all wait for ever");
      if (may_die && !over && draw(&random) % 64 == 0 && !now.threads[0].over) {
        over = now.processes[0].dead = 1;
        for (int i = 0; i < NUM_THREADS; i++) now.threads[i].changed = 1, now.threads[i].asleep = 0;
        continue;
      }
      if (!can_run((uint32_t)t) || draw(&random) % 16 >= stay)
        do t = (int)(draw(&random) % (2 * world));
        while (!can_run((uint32_t)t));
      running = t;
      swapcontext(&explorer, &now.threads[t].context);
      running = -1;
    }
    judge_end();
  }
}

static uint64_t num_states, num_schedules, num_programs;

static void try_programs(uint64_t schedules) {
  num_programs++;
  if (schedules != 0) sample(schedules), num_schedules += schedules;
  else num_states += explore();
}

/* All programs of up to `longest` calls, for each rank. */
static void try_all(uint32_t rank, int longest, uint64_t schedules) {
  static char texts[MOST_RANKS][MOST_OPS + 1];
  if (rank == world) {
    try_programs(schedules);
    return;
  }
  programs[rank] = texts[rank];
  for (int length = 1, number = 5; length <= longest; length++, number *= 5)
    for (int n = 0; n < number; n++) {
      for (int i = 0, digits = n; i < length; i++, digits /= 5) texts[rank][i] = "ABCRS"[digits % 5];
      texts[rank][length] = 0;
      try_all(rank + 1, longest, schedules);
    }
}

int main(int argc, char **argv) {
  uint64_t schedules = 0;
  int longest = 0;
  world = 0;
  for (; argc > 1 && argv[1][0] == '-'; argc--, argv++) {
    const char *value = argv[1] + 2;
    switch (argv[1][1]) {
      case 'c': oversubscribed = 1; break;
      case 'd': may_die = 1; break;
      case 'p': most_preemptions = atoi(value); break;
      case 'r': schedules = strtoull(value, NULL, 10); break;
      case 'a': longest = atoi(value); break;
      case 'n': world = (uint32_t)atoi(value); break;
      default: argc = 0; break;
    }
  }
  if (longest == 0) world = (uint32_t)argc - 1;
  if (argc < 1 || longest > MOST_OPS || world < 2 || world > MOST_RANKS) {
    fprintf(stderr, "explore: see the top of tests/csrc/interleavings/explore.c\n");
    return 2;
  }
  for (uint32_t r = 0; longest == 0 && r < world; r++) {
    programs[r] = argv[r + 1];
    if (strlen(programs[r]) > MOST_OPS) return 2;
  }
  shared_bytes = plx_group_bytes(MOST_RANKS, STAGE_BYTES, CHANNEL_BYTES);
  shared = aligned_alloc(4096, shared_bytes);
  for (uint32_t r = 0; r < MOST_RANKS; r++) heaps[r] = aligned_alloc(4096, HEAP);
  if (longest != 0) try_all(0, longest, schedules);
  else try_programs(schedules);
  printf("explore: nothing found in %llu programs, %llu states and %llu random schedules.\n", (unsigned long long)num_programs,
         (unsigned long long)num_states, (unsigned long long)num_schedules);
  return 0;
}
