/* Keys of all lengths into the table of sums, under a sanitizer: each is found again, with its sum, in both orders. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sums.h"

#define KEYS 20000
#define ROUNDS 3
#define MOST 70

static size_t length_of(size_t key) { return key % MOST; }

/* The bytes of a key lie in memory of its length, so that reading one more is found. Some differ in one byte alone. */
static char *make(size_t key) {
  size_t length = length_of(key);
  char *text = malloc(length ? length : 1);
  assert(text != NULL);
  for (size_t i = 0; i < length; i++) text[i] = (char)(i + 1 == length ? key / MOST : key / MOST >> 8);
  return text;
}

static void check(const struct plx_sums *sums, int sorted) {
  const char *before = NULL;
  size_t length_before = 0;
  int64_t total = 0;
  for (size_t i = 0; i < sums->count; i++) {
    size_t length;
    int64_t sum;
    const char *text = plx_sums_at(sums, i, &length, &sum);
    if (sorted && before != NULL) {
      int order = memcmp(before, text, length < length_before ? length : length_before);
      assert(order < 0 || (order == 0 && length_before < length));
    }
    before = text, length_before = length;
    total += sum;
  }
  assert(total == (int64_t)ROUNDS * KEYS * (KEYS - 1) / 2);
}

int main(void) {
  struct plx_sums sums;
  assert(plx_sums_init(&sums, 12345) == 0);
  for (size_t round = 0; round < ROUNDS; round++) {
    for (size_t key = 0; key < KEYS; key++) {
      char *text = make(key);
      struct plx_sums_key own = {text, length_of(key), (int64_t)key, 0};
      plx_sums_meet(&sums, &own);
      assert(plx_sums_has_room(&sums, key, own.length, 1));
      assert(plx_sums_add(&sums, &own) == 0);
      free(text);
    }
  }
  size_t distinct = 1; /* the empty one, and those of one byte, come again */
  for (size_t key = 1; key < KEYS; key++) distinct += length_of(key) > 1 || (length_of(key) == 1 && key / MOST < 256);
  assert(sums.count == distinct);
  size_t ends[7];
  assert(plx_sums_partition(&sums, 7, ends) == 0 && ends[6] == sums.count);
  check(&sums, 0);
  assert(plx_sums_sort(&sums) == 0);
  check(&sums, 1);
  assert(!plx_sums_has_room(&sums, INT64_MAX, 0, 1));
  plx_sums_free(&sums);
  printf("sums: %zu keys\n", distinct);
  return 0;
}
