/* This file implements the table of sums.h. */
#include "sums.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "crc32.h"

#define FIRST_SLOTS 64
#define FIRST_ROOM 4096
#define UNIT 8
#define HEAD 12 /* sum, length */

static uint64_t read8(const char *at) {
  uint64_t value;
  memcpy(&value, at, sizeof value);
  return value;
}

static uint32_t read4(const char *at) {
  uint32_t value;
  memcpy(&value, at, sizeof value);
  return value;
}

static uint64_t mix(uint64_t a, uint64_t b) {
  __uint128_t product = (__uint128_t)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* This hashes as wyhash does: two words are folded by a multiplication, eight bytes at a time. */
static uint32_t hash_of(const char *text, size_t length, uint64_t seed) {
  uint64_t a = 0, b = 0;
  if (length > 16) {
    const char *last = text + length - 16;
    for (; text < last; text += 16) seed = mix(read8(text) ^ 0xa0761d6478bd642fu, read8(text + 8) ^ seed);
    a = read8(last), b = read8(last + 8);
  } else if (length >= 4) {
    size_t half = length >> 3 << 2;
    a = (uint64_t)read4(text) << 32 | read4(text + half);
    b = (uint64_t)read4(text + length - 4) << 32 | read4(text + length - 4 - half);
  } else if (length > 0) {
    a = (uint64_t)(unsigned char)text[0] << 16 | (uint64_t)(unsigned char)text[length >> 1] << 8 |
        (unsigned char)text[length - 1];
  }
  return (uint32_t)mix(0xe7037ed1a0b428dbu ^ length, mix(a ^ 0x8ebc6af09c88c6e3u, b ^ seed));
}

int plx_sums_init(struct plx_sums *sums, uint64_t seed) {
  memset(sums, 0, sizeof *sums);
  sums->seed = seed;
  sums->mask = FIRST_SLOTS - 1;
  sums->room = FIRST_ROOM;
  sums->used = UNIT; /* nothing lies at 0 */
  sums->slots = calloc(FIRST_SLOTS, sizeof *sums->slots);
  sums->entries = malloc(FIRST_ROOM);
  if (sums->slots != NULL && sums->entries != NULL) return 0;
  plx_sums_free(sums);
  return -ENOMEM;
}

void plx_sums_free(struct plx_sums *sums) {
  free(sums->slots);
  free(sums->entries);
  free(sums->order);
  sums->slots = NULL;
  sums->entries = NULL;
  sums->order = NULL;
  sums->count = 0;
}

void plx_sums_meet(const struct plx_sums *sums, struct plx_sums_key *key) {
  key->hash = hash_of(key->text, key->length, sums->seed);
  __builtin_prefetch(&sums->slots[key->hash & sums->mask]);
}

static size_t size_of_entry(size_t length) { return (HEAD + length + UNIT - 1) / UNIT * UNIT; }

int plx_sums_has_room(const struct plx_sums *sums, uint64_t weight, size_t length, size_t count) {
  return weight <= (uint64_t)INT64_MAX - sums->weight && length < UINT32_MAX && count < UINT32_MAX / 2 - sums->count &&
         (sums->used + length + count * (HEAD + UNIT)) / UNIT < UINT32_MAX;
}

static int grow_slots(struct plx_sums *sums) {
  size_t mask = sums->mask * 2 + 1;
  struct plx_sums_slot *slots = calloc(mask + 1, sizeof *slots);
  if (slots == NULL) return -ENOMEM;
  for (size_t i = 0; i <= sums->mask; i++) {
    if (sums->slots[i].at == 0) continue;
    size_t place = sums->slots[i].hash & mask;
    while (slots[place].at != 0) place = (place + 1) & mask;
    slots[place] = sums->slots[i];
  }
  free(sums->slots);
  sums->slots = slots;
  sums->mask = mask;
  return 0;
}

static int grow_entries(struct plx_sums *sums, size_t needed) {
  size_t room = sums->room;
  while (room < needed) room += room / 2;
  char *entries = realloc(sums->entries, room);
  if (entries == NULL) return -ENOMEM;
  sums->entries = entries;
  sums->room = room;
  return 0;
}

int plx_sums_add(struct plx_sums *sums, const struct plx_sums_key *key) {
  size_t place = key->hash & sums->mask;
  for (; sums->slots[place].at != 0; place = (place + 1) & sums->mask) {
    if (sums->slots[place].hash != key->hash) continue;
    char *entry = sums->entries + (size_t)sums->slots[place].at * UNIT;
    if (read4(entry + 8) != key->length || memcmp(entry + HEAD, key->text, key->length) != 0) continue;
    int64_t sum = (int64_t)read8(entry) + key->value;
    memcpy(entry, &sum, sizeof sum);
    sums->weight += key->value < 0 ? -(uint64_t)key->value : (uint64_t)key->value;
    return 0;
  }
  size_t size = size_of_entry(key->length);
  if (sums->used + size > sums->room && grow_entries(sums, sums->used + size) != 0) return -ENOMEM;
  if ((sums->count + 1) * 4 > (sums->mask + 1) * 3) {
    if (grow_slots(sums) != 0) return -ENOMEM;
    for (place = key->hash & sums->mask; sums->slots[place].at != 0;) place = (place + 1) & sums->mask;
  }
  uint32_t length = (uint32_t)key->length;
  char *entry = sums->entries + sums->used;
  memcpy(entry, &key->value, sizeof key->value);
  memcpy(entry + 8, &length, sizeof length);
  memcpy(entry + HEAD, key->text, key->length);
  sums->slots[place] = (struct plx_sums_slot){key->hash, (uint32_t)(sums->used / UNIT)};
  sums->weight += key->value < 0 ? -(uint64_t)key->value : (uint64_t)key->value;
  sums->has_border |= memchr(key->text, '\n', key->length) != NULL;
  sums->text_bytes += key->length;
  sums->used += size;
  sums->ordered = 0;
  sums->count++;
  return 0;
}

/* Entries count as far as they are written: untouched memory is none. An order is made at the end, and takes as much
 * again while it is. */
static size_t bytes_with(const struct plx_sums *sums, size_t num_slots) {
  return num_slots * sizeof *sums->slots + sums->used + 2 * sums->count * sizeof *sums->order;
}

size_t plx_sums_bytes(const struct plx_sums *sums) { return bytes_with(sums, sums->mask + 1); }

size_t plx_sums_peak_bytes(const struct plx_sums *sums) {
  int grows = (sums->count + 1) * 4 > (sums->mask + 1) * 3;
  return bytes_with(sums, (sums->mask + 1) * (grows ? 3 : 1));
}

static int make_order(struct plx_sums *sums) {
  sums->ordered = 0; /* it stays 0 until all stand in it: a failure on the way leaves none */
  free(sums->order);
  sums->order = malloc((sums->count + 1) * sizeof *sums->order);
  return sums->order == NULL ? -ENOMEM : 0;
}

static size_t length_at(const struct plx_sums *sums, uint32_t at) {
  return read4(sums->entries + (size_t)at * UNIT + 8);
}

static const char *text_at(const struct plx_sums *sums, uint32_t at) {
  return sums->entries + (size_t)at * UNIT + HEAD;
}

static int compare(const void *left, const void *right, void *context) {
  const struct plx_sums_order *a = left, *b = right;
  const struct plx_sums *sums = context;
  if (a->rank != b->rank) return a->rank < b->rank ? -1 : 1;
  size_t m = length_at(sums, a->at), n = length_at(sums, b->at);
  int order = memcmp(text_at(sums, a->at), text_at(sums, b->at), m < n ? m : n);
  return order != 0 ? order : (m > n) - (m < n);
}

int plx_sums_sort(struct plx_sums *sums) {
  if (make_order(sums) != 0) return -ENOMEM;
  size_t at = UNIT;
  for (size_t i = 0; i < sums->count; i++) {
    uint32_t here = (uint32_t)(at / UNIT);
    size_t length = length_at(sums, here);
    const char *text = text_at(sums, here);
    uint64_t rank = 0;
    for (size_t byte = 0; byte < 8; byte++) rank = rank << 8 | (byte < length ? (unsigned char)text[byte] : 0);
    sums->order[i] = (struct plx_sums_order){rank, here};
    at += size_of_entry(length);
  }
  qsort_r(sums->order, sums->count, sizeof *sums->order, compare, sums);
  sums->ordered = sums->count;
  return 0;
}

int plx_sums_partition(struct plx_sums *sums, size_t partitions, size_t *ends) {
  uint32_t table[256];
  plx_crc32_table(table);
  if (make_order(sums) != 0) return -ENOMEM;
  struct plx_sums_order *came = malloc((sums->count + 1) * sizeof *came);
  if (came == NULL) return -ENOMEM;
  memset(ends, 0, partitions * sizeof *ends);
  size_t at = UNIT;
  for (size_t i = 0; i < sums->count; i++) {
    uint32_t here = (uint32_t)(at / UNIT);
    size_t length = length_at(sums, here);
    came[i] = (struct plx_sums_order){plx_crc32(table, 0, text_at(sums, here), length) % partitions, here};
    ends[came[i].rank]++;
    at += size_of_entry(length);
  }
  size_t start = 0;
  for (size_t i = 0; i < partitions; i++) {
    size_t size = ends[i];
    ends[i] = start; /* its next stands there, until all do */
    start += size;
  }
  for (size_t i = 0; i < sums->count; i++) sums->order[ends[came[i].rank]++] = came[i];
  free(came);
  sums->ordered = sums->count;
  return 0;
}

const char *plx_sums_at(const struct plx_sums *sums, size_t place, size_t *length, int64_t *sum) {
  uint32_t at = sums->order[place].at;
  *length = length_at(sums, at);
  *sum = (int64_t)read8(sums->entries + (size_t)at * UNIT);
  return text_at(sums, at);
}
