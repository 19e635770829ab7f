/* The collectives share these functions: how a call begins and ends, and how it is recorded. */
#ifndef PLX_CALL_H
#define PLX_CALL_H

#include "agreement.h"
#include "recorder.h"

/* Close the phase that was left open, then fill the fields that must agree. What `call` is when that fails is undefined:
 * there is no such call. */
static inline int plx_begin(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, struct plx_call *call,
                            int kind, size_t count, int dtype, int redop, int root) {
  int code = g->open.step != 0 ? plx_close_phase(g, w) : PLX_OK;
  if (code != PLX_OK) return code;
  struct plx_call c = {0};
  /* A rank whose sync failed must not write into a stage of a phase that others may have passed and be reading. Whoever
   * begins after the end fails at its first sync, so nothing that it would read back is lost. */
  g->over = atomic_load_explicit(&g->header->poison, memory_order_acquire) != 0;
  c.seq = ++g->seq;
  c.count = count;
  c.heap = PLX_NO_HEAP;
  c.kind = (uint16_t)kind;
  c.dtype = (uint8_t)dtype;
  c.redop = (uint8_t)redop;
  c.root = root;
  c.call_site = o->call_site;
  *call = c;
  return PLX_OK;
}

/* Return a digest of uneven sizes; 0 when they are all the same, so that even calls need none. It is FNV-1a over the
 * sizes. */
static inline uint64_t plx_digest(const size_t *sizes, uint32_t n) {
  uint64_t hash = 0xcbf29ce484222325ull;
  int even = 1;
  for (uint32_t i = 0; i < n; i++) {
    hash = (hash ^ sizes[i]) * 0x100000001b3ull;
    even &= sizes[i] == sizes[0];
  }
  return even ? 0 : (hash | 1);
}

static inline size_t plx_min(size_t a, size_t b) { return a < b ? a : b; }

static inline int plx_finish(struct plx_group *g, struct plx_record *record, const struct plx_call *call, int code) {
  if (code == PLX_OK)
    atomic_store_explicit(&plx_rank_of(g, g->rank)->finished, call->seq, memory_order_release);
  plx_record_leave(g, record, code);
  return code;
}

/* Return the offset of `data` in our heap, or PLX_NO_HEAP. */
static inline uint64_t plx_heap_offset(const struct plx_group *g, const void *data, size_t bytes) {
  if (g->heaps == NULL) return PLX_NO_HEAP;
  uintptr_t base = (uintptr_t)g->heaps[g->rank], at = (uintptr_t)data;
  return at >= base && at + bytes <= base + g->heap_bytes ? at - base : PLX_NO_HEAP;
}

/* Find, after the first sync, where each rank's tensor lies, if all of them lie in their ranks' heaps; the offsets need
 * not be the same. All ranks come to the same answer. */
static inline int plx_all_in_heap(const struct plx_group *g, uint64_t *offset) {
  for (uint32_t r = 0; r < g->world; r++)
    if ((offset[r] = plx_rank_of(g, r)->call[g->phase & 1].heap) == PLX_NO_HEAP) return 0;
  return 1;
}

#endif
