/* What two cores need for the bytes that a collective has to move: the least that any implementation could take here.
 *
 *   write     each core writes a buffer of its own
 *   copy      each core copies between two buffers of its own: what a rank would do that could read its peer's memory
 *   hand over core 0 copies a buffer into two small stages in turn, core 1 copies from them into another buffer
 *   exchange  both hand over to each other at once
 *
 * cc -O2 -D_GNU_SOURCE -pthread -Icsrc benchmarks/collectives/floors.c csrc/copy.c -o floors && ./floors
 *
 * Each line: the best of several rounds with the C library's memcpy, then with plain stores. plx_copy is the former on
 * AMD's processors, the latter on others of x86.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "copy.h"

#define MIB ((size_t)1 << 20)
#define MOST (64 * MIB)
#define STAGE ((size_t)128 << 10)
#define ROUNDS 5
#define VOLUME (256 * MIB) /* moved in each round */

typedef void (*copy_fn)(void *to, const void *from, size_t n);

enum work { WRITE, COPY, HAND_OVER, EXCHANGE, NUM_WORKS };

struct core {
  _Alignas(128) _Atomic uint64_t filled; /* stages, ever */
  _Alignas(128) _Atomic uint64_t emptied;
  _Alignas(128) _Atomic uint64_t arrived;
  uint64_t syncs;
  unsigned char *in, *out, *stages;
};

static struct core cores[2];
static double best[NUM_WORKS][2]; /* seconds; of the size at hand */

static void await(_Atomic uint64_t *counter, uint64_t least) {
  while (atomic_load_explicit(counter, memory_order_acquire) < least) __asm__ volatile("" ::: "memory");
}

static void library_copy(void *to, const void *from, size_t n) { memcpy(to, from, n); }

static void sync_cores(int me) {
  uint64_t number = ++cores[me].syncs;
  atomic_store_explicit(&cores[me].arrived, number, memory_order_release);
  await(&cores[!me].arrived, number);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void give(struct core *from, size_t at, copy_fn copy) {
  uint64_t turn = atomic_load_explicit(&from->filled, memory_order_relaxed);
  if (turn >= 2) await(&from->emptied, turn - 1);
  copy(from->stages + turn % 2 * STAGE, from->in + at, STAGE);
  atomic_store_explicit(&from->filled, turn + 1, memory_order_release);
}

static void take(struct core *from, unsigned char *to, copy_fn copy) {
  uint64_t turn = atomic_load_explicit(&from->emptied, memory_order_relaxed);
  await(&from->filled, turn + 1);
  copy(to, from->stages + turn % 2 * STAGE, STAGE);
  atomic_store_explicit(&from->emptied, turn + 1, memory_order_release);
}

static void once(int me, enum work work, size_t bytes, copy_fn copy) {
  struct core *own = &cores[me], *peer = &cores[!me];
  if (work == COPY) copy(own->out, own->in, bytes);
  if (work == WRITE && copy == library_copy) memset(own->out, 1, bytes);
  for (size_t at = 0; at < bytes; at += STAGE) {
    if (work == WRITE && copy != library_copy) copy(own->out + at, own->stages, STAGE); /* from the cache */
    if (work == EXCHANGE || (work == HAND_OVER && me == 0)) give(own, at, copy);
    if (work == EXCHANGE || (work == HAND_OVER && me == 1)) take(peer, own->out + at, copy);
  }
}

static void *run(void *argument) {
  int me = argument == &cores[1];
  static const size_t sizes[] = {2 * MIB, 4 * MIB, 32 * MIB, 64 * MIB};
  static const char *const names[NUM_WORKS] = {"write", "copy", "hand over", "exchange"};
  cpu_set_t mine;
  CPU_ZERO(&mine);
  CPU_SET(me, &mine);
  pthread_setaffinity_np(pthread_self(), sizeof mine, &mine);
  memset(cores[me].in, 1, MOST);
  memset(cores[me].out, 1, MOST);
  memset(cores[me].stages, 1, 2 * STAGE);
  for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
    if (me == 0) memset(best, 0, sizeof best);
    for (int round = 0; round < ROUNDS; round++)
      for (int work = 0; work < NUM_WORKS; work++)
        for (int own = 0; own < 2; own++) {
          size_t times = VOLUME / sizes[s];
          sync_cores(me);
          double began = now();
          for (size_t i = 0; i < times; i++) once(me, (enum work)work, sizes[s], own ? plx_copy_by_stores : library_copy);
          sync_cores(me);
          double took = (now() - began) / (double)times;
          if (me == 0 && (best[work][own] == 0 || took < best[work][own])) best[work][own] = took;
        }
    for (int work = 0; me == 0 && work < NUM_WORKS; work++)
      printf("%2zu MiB  %-9s  memcpy %7.0f us  stores %7.0f us\n", sizes[s] / MIB, names[work], best[work][0] * 1e6,
             best[work][1] * 1e6);
  }
  return NULL;
}

int main(void) {
  pthread_t other;
  for (int i = 0; i < 2; i++) {
    cores[i].in = aligned_alloc(4096, MOST);
    cores[i].out = aligned_alloc(4096, MOST);
    cores[i].stages = aligned_alloc(4096, 2 * STAGE);
    if (cores[i].in == NULL || cores[i].out == NULL || cores[i].stages == NULL) return 1;
  }
  if (pthread_create(&other, NULL, run, &cores[1]) != 0) return 1;
  run(&cores[0]);
  return pthread_join(other, NULL);
}
