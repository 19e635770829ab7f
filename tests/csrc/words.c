/* An owner and its readers, as in phalanx/optim/undo.py: whoever sees a word may read the bytes that it speaks of.
 *
 *   owner    aside = step    word = 2 step (saved)    memory = step    word = 2 step + 1 (done)    waits for the readers
 *   readers  until they see saved: aside is of this step; until they see done: memory is, too
 *
 * The thread sanitizer reports a word that releases nothing, on any processor; on ARM the values show it as well.
 * Usage: words [steps]. Exit code 0: nothing found. */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "word.h"

#define READERS 3
#define WIDTH 64

static _Atomic uint64_t word, seen[READERS];
static uint64_t aside[WIDTH], memory[WIDTH], steps = 20000;

static void await(const _Atomic uint64_t *what, uint64_t least) {
  while (plx_word_load(what) < least) sched_yield();
}

static void check(const uint64_t *bytes, uint64_t step, const char *what) {
  for (int i = 0; i < WIDTH; i++) {
    if (bytes[i] != step) {
      fprintf(stderr, "step %llu: %s holds %llu\n", (unsigned long long)step, what, (unsigned long long)bytes[i]);
      exit(1);
    }
  }
}

static void *read_all(void *mine) {
  for (uint64_t step = 1; step <= steps; step++) {
    await(&word, 2 * step);
    check(aside, step, "aside");
    await(&word, 2 * step + 1);
    check(memory, step, "memory");
    plx_word_store(mine, step);
  }
  return NULL;
}

int main(int argc, char **argv) {
  if (argc > 1) steps = strtoull(argv[1], NULL, 10);
  pthread_t readers[READERS];
  for (int r = 0; r < READERS; r++)
    if (pthread_create(&readers[r], NULL, read_all, &seen[r]) != 0) return 1;
  for (uint64_t step = 1; step <= steps; step++) {
    for (int i = 0; i < WIDTH; i++) aside[i] = step;
    plx_word_store(&word, 2 * step);
    for (int i = 0; i < WIDTH; i++) memory[i] = step;
    plx_word_store(&word, 2 * step + 1);
    for (int r = 0; r < READERS; r++) await(&seen[r], step);
  }
  for (int r = 0; r < READERS; r++) pthread_join(readers[r], NULL);
  return 0;
}
