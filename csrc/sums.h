/* This hash table adds integers up by text, and holds the bytes of its keys itself.
 *
 *   slots    ┌──────┬──────┬──────┬──────┐        a power of two of them, at most 3/4 taken; probed one after another
 *            │ hash │      │ hash │ hash │
 *            │ at ──┼──┐   │ at   │ at   │
 *            └──────┴──│───┴──────┴──────┘
 *   entries  sum length text··│ sum length text·····│        in the order in which the keys came; each at a multiple of 8
 *
 * Cost: a lookup touches two lines of the cache; a key takes 12 bytes, its text, and 11 to 21 bytes of slots. */
#ifndef SUMS_H
#define SUMS_H

#include <stddef.h>
#include <stdint.h>

struct plx_sums_slot {
  uint32_t hash, at; /* at: in units of 8 bytes; 0 is none */
};

struct plx_sums_order {
  uint64_t rank; /* it stands here by this: a partition, or how its text begins */
  uint32_t at;
};

struct plx_sums {
  struct plx_sums_slot *slots;
  char *entries;
  struct plx_sums_order *order; /* NULL until it is asked for */
  size_t mask, count, used, room, text_bytes, ordered; /* ordered: so many have a place in `order` */
  uint64_t seed, weight; /* weight: the sum of what was added without its signs, so that no sum overflows */
  int has_border;        /* a key contains "\n", which lies between keys where they are packed */
};

/* This is a key on its way in. */
struct plx_sums_key {
  const char *text;
  size_t length;
  int64_t value;
  uint32_t hash;
};

/* The source of the keys must not know `seed`. Return 0, or -ENOMEM. */
int plx_sums_init(struct plx_sums *sums, uint64_t seed);
void plx_sums_free(struct plx_sums *sums);

/* Compute the hash of a key, and bring its slot on the way to the cache. */
void plx_sums_meet(const struct plx_sums *sums, struct plx_sums_key *key);
/* Return whether `values` of such a weight can be added to any sum, and `length` bytes more be held. */
int plx_sums_has_room(const struct plx_sums *sums, uint64_t weight, size_t length, size_t count);
/* Add a key that has been met. Returns 0, or -ENOMEM: nothing was added. */
int plx_sums_add(struct plx_sums *sums, const struct plx_sums_key *key);
/* Return the bytes that it holds; and those that it holds for a moment when it grows next. */
size_t plx_sums_bytes(const struct plx_sums *sums);
size_t plx_sums_peak_bytes(const struct plx_sums *sums);

/* Bring the keys into the order of their bytes, which is that of Python's text, too. Returns 0, or -ENOMEM. */
int plx_sums_sort(struct plx_sums *sums);
/* Bring the keys into the order of their partitions, zlib's crc32 modulo `partitions`, and within one as they came.
 * `ends` is where each partition ends. Return 0, or -ENOMEM. */
int plx_sums_partition(struct plx_sums *sums, size_t partitions, size_t *ends);
/* Return the key and the sum at a place of that order. */
const char *plx_sums_at(const struct plx_sums *sums, size_t place, size_t *length, int64_t *sum);

#endif
