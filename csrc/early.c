/* This broadcast leaves its phase open; the picture and the proof are in early.h. */
#include "early.h"

#include "call.h"
#include "collectives.h"
#include "copy.h"

int plx_broadcast_buffers(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, void *data, size_t bytes,
                          void *area, int dtype, int root, uint64_t number) {
  if (root < 0 || root >= (int)g->world) return PLX_INVALID;
  int is_root = (uint32_t)root == g->rank, is_large = bytes > g->stage_bytes && g->world > 1;
  if (is_root && is_large && plx_heap_offset(g, area, bytes) == PLX_NO_HEAP) return PLX_INVALID;
  struct plx_call call;
  int code = plx_begin(g, w, o, &call, PLX_BROADCAST_BUFFERS, bytes, dtype, PLX_SUM, root);
  if (code != PLX_OK) return code;
  call.digest = number;
  struct plx_record *record = plx_record_enter(g, &call, o, -1);
  uint64_t recorded = atomic_load_explicit(&plx_rank_of(g, g->rank)->next_record, memory_order_relaxed);
  if (is_root && g->world > 1) {
    if (is_large) call.heap = plx_heap_offset(g, area, bytes);
    /* After the group's end the stage is one that nobody reads, and the area may still be read. */
    if (!is_large) plx_copy(plx_stage_of(g, g->rank, g->phase), data, bytes);
    else if (!g->over) plx_copy(area, data, bytes);
  }
  plx_publish(g, &call);
  code = plx_arrive(g, w);
  if (code == PLX_OK && !is_root) {
    code = plx_await_rank(g, w, (uint32_t)root, g->step);
    if (code == PLX_OK && !plx_calls_same(g, (uint32_t)root, &call)) code = plx_poison(g, PLX_MISMATCH, g->rank);
    if (code == PLX_OK) {
      uint64_t heap = plx_rank_of(g, (uint32_t)root)->call[g->phase & 1].heap;
      plx_copy(data, heap != PLX_NO_HEAP ? g->heaps[root] + heap : plx_stage_of(g, (uint32_t)root, g->phase), bytes);
    }
  }
  if (code == PLX_OK) plx_leave_open(g, &call, record, recorded);
  return plx_finish(g, record, &call, code);
}
