/* One contestant: the time of an all_reduce of 4 bytes between two processes, in a direct call into the core.
 *
 * Usage: cost CORE CORE ROUNDS CALLS. Prints the nanoseconds per call of each round, as rank 0 sees it, a line each; then,
 * after a line "alone", those of entering and leaving the recorder and doing nothing else.
 *
 * `run.py` links it twice: as it is, and with `plx_record_enter` and `plx_record_leave` replaced by the `__wrap_`
 * functions below, which do nothing. The core itself is compiled once, without a switch for this.
 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "collectives.h"
#include "futex.h"
#include "recorder.h"

#define STAGE 8192u
#define CHANNEL 4096u

static struct plx_record nowhere;

struct plx_record *__wrap_plx_record_enter(struct plx_group *g, const struct plx_call *call, const struct plx_origin *o,
                                           int32_t peer) {
  (void)g, (void)call, (void)o, (void)peer;
  return &nowhere;
}

void __wrap_plx_record_leave(struct plx_group *g, struct plx_record *record, int status) {
  (void)g, (void)record, (void)status;
}

static struct plx_group join(void *base, uint32_t rank, int core) {
  struct plx_header *header = base;
  struct plx_group g = {.base = base, .header = header, .rank = rank, .world = header->world,
                        .stage_bytes = header->stage_bytes, .spin_ns = 100000};
  g.pidfds = malloc(2 * sizeof *g.pidfds);
  g.pidfds[0] = g.pidfds[1] = -1;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  if (sched_setaffinity(0, sizeof cores, &cores) != 0) perror("cost: cannot pin");
  return g;
}

static void work(struct plx_group *g, long rounds, long calls) {
  const uint64_t shape[1] = {1};
  const struct plx_origin here = {.ndim = 1, .shape = shape};
  float value = 1.0f;
  for (long round = 0; round < rounds; round++) {
    struct plx_wait wait = {.deadline_ns = UINT64_MAX, .spin_ns = g->spin_ns, .failed_rank = -1};
    if (plx_barrier(g, &wait, &here) != PLX_OK) exit(1);
    uint64_t begin = plx_now_ns();
    for (long i = 0; i < calls; i++)
      if (plx_all_reduce(g, &wait, &here, &value, &value, 1, PLX_F32, PLX_MAX, -1) != PLX_OK) exit(1);
    if (g->rank == 0) printf("%.1f\n", (double)(plx_now_ns() - begin) / (double)calls);
  }
}

static void alone(struct plx_group *g, long rounds, long calls) {
  const uint64_t shape[1] = {1};
  const struct plx_origin here = {.ndim = 1, .shape = shape};
  const struct plx_call call = {.seq = 1, .count = 1, .kind = PLX_ALL_REDUCE, .dtype = PLX_F32, .root = -1};
  puts("alone");
  for (long round = 0; round < rounds; round++) {
    uint64_t begin = plx_now_ns();
    for (long i = 0; i < calls; i++) plx_record_leave(g, plx_record_enter(g, &call, &here, -1), PLX_OK);
    printf("%.1f\n", (double)(plx_now_ns() - begin) / (double)calls);
  }
}

int main(int count, char **words) {
  if (count != 5) return 2;
  size_t bytes = plx_group_bytes(2, STAGE, CHANNEL);
  void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED || plx_group_format(base, 2, STAGE, CHANNEL, 0) != PLX_OK) return 1;
  long rounds = atol(words[3]), calls = atol(words[4]);
  pid_t other = fork();
  struct plx_group g = join(base, other == 0, atoi(words[other == 0 ? 2 : 1]));
  work(&g, rounds, calls);
  if (other == 0) return 0;
  int status = 0;
  if (waitpid(other, &status, 0) != other || status != 0) return 1;
  alone(&g, rounds, calls);
  return 0;
}
