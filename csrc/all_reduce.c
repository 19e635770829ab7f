/* all_reduce, reduce and reduce_scatter go one of three ways through the same memory, and add in the same order in each.
 *
 *   direct   every rank stages its chunk; one sync; every rank adds up all chunks itself.          P-1 chunks read
 *   sliced   every rank stages its chunk; sync; each adds up its slice of all chunks and leaves the
 *            result in its own stage; sync; everybody collects the slices.                     2(P-1)/P chunks read
 *   in place the tensors lie in the shared heap: sync; each adds up its slice of all tensors and writes the
 *            result into all of them; sync.                                                     nothing is staged
 *
 * Whichever way, element i is in[0][i] op in[1][i] op ... op in[P-1][i], in that order: the same bits everywhere.
 */
#include <string.h>

#include "call.h"
#include "collectives.h"
#include "copy.h"
#include "reduce.h"

/* Up to here one sync and P-1 reads beat two syncs; measured with benchmarks/collectives. */
static size_t direct_limit(const struct plx_group *g) {
  if (g->world == 2) return SIZE_MAX;
  return g->oversubscribed ? 65536 : 16384;
}

/* A staged way returns this when, after the first sync, some rank's tensor turned out to lie in its heap. All ranks see
 * the same calls, so all come to the same answer. */
#define IN_HEAP (-1)

/* Small tensors go through the stage wherever they lie: copying them costs less than the second sync. */
#define HEAP_FROM_BYTES 4096

static int any_in_heap(const struct plx_group *g) {
  for (uint32_t r = 0; r < g->world; r++)
    if (plx_rank_of(g, r)->call[g->phase & 1].heap != PLX_NO_HEAP) return 1;
  return 0;
}

static int reduce_direct(struct plx_group *g, struct plx_wait *w, const struct plx_call *call, const char *in, char *out,
                         size_t bytes, size_t width, plx_reduce_fn kernel) {
  const void *src[PLX_MAX_WORLD];
  size_t chunk = g->stage_bytes / width * width, at = 0;
  int keep = call->root < 0 || (uint32_t)call->root == g->rank;
  do {
    size_t n = plx_min(chunk, bytes - at);
    if (at == 0) plx_publish(g, call);
    /* A rank that only gives need not stage for itself; all others read its stage. */
    plx_copy(plx_stage_of(g, g->rank, g->phase), in + at, n);
    int code = at == 0 ? plx_sync_calls(g, w, call) : plx_sync(g, w);
    if (code == PLX_OK && at == 0 && any_in_heap(g)) code = IN_HEAP;
    if (code != PLX_OK) return code;
    if (keep && n != 0) {
      for (uint32_t r = 0; r < g->world; r++) src[r] = plx_stage_of(g, r, g->phase);
      src[g->rank] = in + at;
      kernel(out + at, src, g->world, n / width);
    }
    g->phase++;
    at += n;
  } while (at < bytes);
  return PLX_OK;
}

/* Slices of a chunk start on cache lines, so that no two ranks write into one. */
static size_t slice_start(size_t n, uint32_t index, uint32_t parts) {
  size_t line = 64, lines = (n + line - 1) / line;
  return plx_min(n, lines * index / parts * line);
}

static int reduce_sliced(struct plx_group *g, struct plx_wait *w, const struct plx_call *call, const char *in, char *out,
                         size_t bytes, size_t width, plx_reduce_fn kernel) {
  const void *src[PLX_MAX_WORLD];
  size_t chunk = g->stage_bytes / 64 * 64, at = 0;
  do {
    size_t n = plx_min(chunk, bytes - at);
    unsigned char *mine = plx_stage_of(g, g->rank, g->phase);
    size_t start = slice_start(n, g->rank, g->world), end = slice_start(n, g->rank + 1, g->world);
    if (at == 0) plx_publish(g, call);
    plx_copy(mine, in + at, start); /* no other rank reads our own slice */
    plx_copy(mine + end, in + at + end, n - end);
    int code = at == 0 ? plx_sync_calls(g, w, call) : plx_sync(g, w);
    if (code == PLX_OK && at == 0 && any_in_heap(g)) code = IN_HEAP;
    if (code != PLX_OK) return code;
    if (end > start) {
      for (uint32_t r = 0; r < g->world; r++) src[r] = plx_stage_of(g, r, g->phase) + start;
      src[g->rank] = in + at + start;
      kernel(mine + start, src, g->world, (end - start) / width);
    }
    code = plx_sync(g, w);
    if (code != PLX_OK) return code;
    for (uint32_t i = 0; i < g->world; i++) {
      uint32_t r = (g->rank + i) % g->world; /* start with our own, so that not all read rank 0 first */
      size_t from = slice_start(n, r, g->world), to = slice_start(n, r + 1, g->world);
      plx_copy(out + at + from, plx_stage_of(g, r, g->phase) + from, to - from);
    }
    g->phase++;
    at += n;
  } while (at < bytes);
  return PLX_OK;
}

/* This comes after the first sync: rank r's tensor lies at offset[r] of its heap. */
static int reduce_in_place(struct plx_group *g, struct plx_wait *w, const uint64_t *offset, size_t bytes, size_t width,
                           plx_reduce_fn kernel) {
  const void *src[PLX_MAX_WORLD];
  size_t start = slice_start(bytes, g->rank, g->world), end = slice_start(bytes, g->rank + 1, g->world);
  size_t block = 16384 / width * width; /* the result stays in the first-level cache while it is handed out */
  for (size_t at = start; at < end; at += block) {
    size_t n = plx_min(block, end - at);
    for (uint32_t r = 0; r < g->world; r++) src[r] = g->heaps[r] + offset[r] + at;
    unsigned char *mine = g->heaps[g->rank] + offset[g->rank] + at;
    kernel(mine, src, g->world, n / width);
    for (uint32_t i = 1; i < g->world; i++) {
      uint32_t r = (g->rank + i) % g->world;
      memcpy(g->heaps[r] + offset[r] + at, mine, n);
    }
  }
  g->phase++;
  return plx_sync(g, w);
}

static int reduce_staged(struct plx_group *g, struct plx_wait *w, const struct plx_call *call, const void *in, void *out,
                         size_t bytes, size_t width, plx_reduce_fn kernel) {
  if (call->root >= 0 || bytes <= direct_limit(g)) return reduce_direct(g, w, call, in, out, bytes, width, kernel);
  return reduce_sliced(g, w, call, in, out, bytes, width, kernel);
}

int plx_all_reduce(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *in, void *out,
                   size_t count, int dtype, int redop, int root) {
  plx_reduce_fn kernel = plx_reduce_kernel(dtype, redop);
  if (kernel == NULL || root >= (int)g->world) return PLX_INVALID;
  size_t width = plx_dtype_size(dtype), bytes = count * width;
  struct plx_call call;
  int code = plx_begin(g, w, o, &call, root < 0 ? PLX_ALL_REDUCE : PLX_REDUCE, count, dtype, redop, root);
  if (code != PLX_OK) return code;
  if (root < 0 && in == out && bytes > HEAP_FROM_BYTES) call.heap = plx_heap_offset(g, out, bytes);
  struct plx_record *record = plx_record_enter(g, &call, o, -1);
  if (call.heap == PLX_NO_HEAP) {
    code = reduce_staged(g, w, &call, in, out, bytes, width, kernel);
  } else {
    plx_publish(g, &call);
    code = plx_sync_calls(g, w, &call);
    uint64_t offset[PLX_MAX_WORLD];
    if (code == PLX_OK) code = plx_all_in_heap(g, offset) ? reduce_in_place(g, w, offset, bytes, width, kernel) : IN_HEAP;
  }
  if (code == IN_HEAP) { /* some lie in the heap, some do not: all begin again, through the stage */
    g->phase++;
    call.heap = PLX_NO_HEAP;
    code = reduce_staged(g, w, &call, in, out, bytes, width, kernel);
  }
  return plx_finish(g, record, &call, code);
}

int plx_reduce_scatter(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *const *in,
                       const size_t *counts, void *out, int dtype, int redop) {
  plx_reduce_fn kernel = plx_reduce_kernel(dtype, redop);
  if (kernel == NULL) return PLX_INVALID;
  size_t width = plx_dtype_size(dtype), longest = 0;
  for (uint32_t r = 0; r < g->world; r++) longest = counts[r] > longest ? counts[r] : longest;
  struct plx_call call;
  int code = plx_begin(g, w, o, &call, PLX_REDUCE_SCATTER, counts[0], dtype, redop, -1);
  if (code != PLX_OK) return code;
  call.digest = plx_digest(counts, g->world);
  struct plx_record *record = plx_record_enter(g, &call, o, -1);
  /* The stage holds one part per destination other than ourselves. */
  size_t part = g->stage_bytes / (g->world > 1 ? g->world - 1 : 1) / 64 * 64, at = 0;
  const void *src[PLX_MAX_WORLD];
  do {
    if (at == 0) plx_publish(g, &call);
    unsigned char *mine = plx_stage_of(g, g->rank, g->phase);
    for (uint32_t r = 0; r < g->world; r++) {
      size_t bytes = counts[r] * width;
      if (r == g->rank || at >= bytes) continue;
      plx_copy(mine + (r - (r > g->rank)) * part, (const char *)in[r] + at, plx_min(part, bytes - at));
    }
    code = at == 0 ? plx_sync_calls(g, w, &call) : plx_sync(g, w);
    if (code != PLX_OK) break;
    size_t bytes = counts[g->rank] * width;
    if (at < bytes) {
      size_t n = plx_min(part, bytes - at);
      for (uint32_t r = 0; r < g->world; r++)
        src[r] = r == g->rank ? (const unsigned char *)in[r] + at
                              : plx_stage_of(g, r, g->phase) + (g->rank - (g->rank > r)) * part;
      kernel((char *)out + at, src, g->world, n / width);
    }
    g->phase++;
    at += part;
  } while (at < longest * width);
  return plx_finish(g, record, &call, code);
}
