/* These collectives move bytes and combine nothing: barrier, broadcast, gather (and all_gather), scatter, all_to_all.
 *
 * All go in phases: a rank writes into its own stage, meets the others at one sync, and reads from their stages. Each
 * byte is written once into shared memory and read once by each rank that wants it.
 */
#include "call.h"
#include "collectives.h"
#include "copy.h"

int plx_barrier(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o) {
  struct plx_call call;
  int code = plx_begin(g, w, o, &call, PLX_BARRIER, 0, PLX_BYTES, PLX_SUM, -1);
  if (code != PLX_OK) return code;
  struct plx_record *record = plx_record_enter(g, &call, o, -1);
  plx_publish(g, &call);
  code = plx_sync_calls(g, w, &call);
  if (code == PLX_OK) g->phase++;
  return plx_finish(g, record, &call, code);
}

int plx_broadcast(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, void *data, size_t bytes,
                  int dtype, int root) {
  if (root < 0 || root >= (int)g->world) return PLX_INVALID;
  struct plx_call call;
  int code = plx_begin(g, w, o, &call, PLX_BROADCAST, bytes, dtype, PLX_SUM, root);
  if (code != PLX_OK) return code;
  struct plx_record *record = plx_record_enter(g, &call, o, -1);
  size_t at = 0;
  do {
    size_t n = plx_min(g->stage_bytes, bytes - at);
    if (at == 0) plx_publish(g, &call);
    if ((uint32_t)root == g->rank && g->world > 1) plx_copy(plx_stage_of(g, g->rank, g->phase), (char *)data + at, n);
    code = at == 0 ? plx_sync_calls(g, w, &call) : plx_sync(g, w);
    if (code != PLX_OK) break;
    if ((uint32_t)root != g->rank) plx_copy((char *)data + at, plx_stage_of(g, (uint32_t)root, g->phase), n);
    g->phase++;
    at += n;
  } while (at < bytes);
  return plx_finish(g, record, &call, code);
}

/* All inputs lie in their ranks' heaps: the rest of them, from `at` on, is read where it lies. */
static int gather_in_heap(struct plx_group *g, struct plx_wait *w, const void *in, void *const *out, const size_t *bytes,
                          size_t at, const uint64_t *offset, int keep) {
  for (uint32_t i = 0; keep && i < g->world; i++) {
    uint32_t r = (g->rank + i) % g->world;
    const void *from = i == 0 ? in : g->heaps[r] + offset[r];
    if (at < bytes[r]) plx_copy((char *)out[r] + at, (const char *)from + at, bytes[r] - at);
  }
  return plx_sync(g, w); /* no rank writes into its input again before all have read it */
}

int plx_gather(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *in, void *const *out,
               const size_t *bytes, int dtype, int root) {
  if (root >= (int)g->world) return PLX_INVALID;
  size_t longest = 0;
  for (uint32_t r = 0; r < g->world; r++) longest = bytes[r] > longest ? bytes[r] : longest;
  struct plx_call call;
  int code = plx_begin(g, w, o, &call, root < 0 ? PLX_ALL_GATHER : PLX_GATHER, bytes[0], dtype, PLX_SUM, root);
  if (code != PLX_OK) return code;
  call.digest = plx_digest(bytes, g->world);
  struct plx_record *record = plx_record_enter(g, &call, o, -1);
  int keep = root < 0 || (uint32_t)root == g->rank, in_heap = 0;
  size_t at = 0, mine = bytes[g->rank];
  uint64_t offset[PLX_MAX_WORLD];
  if (longest > g->stage_bytes && g->world > 1) call.heap = plx_heap_offset(g, in, mine);
  do {
    if (at == 0) plx_publish(g, &call);
    if (at < mine && g->world > 1 && (root < 0 || (uint32_t)root != g->rank))
      plx_copy(plx_stage_of(g, g->rank, g->phase), (const char *)in + at, plx_min(g->stage_bytes, mine - at));
    code = at == 0 ? plx_sync_calls(g, w, &call) : plx_sync(g, w);
    if (code != PLX_OK) break;
    if (keep && at < mine) plx_copy((char *)out[g->rank] + at, (const char *)in + at, plx_min(g->stage_bytes, mine - at));
    for (uint32_t i = 1; keep && i < g->world; i++) {
      uint32_t r = (g->rank + i) % g->world;
      if (at < bytes[r]) plx_copy((char *)out[r] + at, plx_stage_of(g, r, g->phase), plx_min(g->stage_bytes, bytes[r] - at));
    }
    if (at == 0 && call.heap != PLX_NO_HEAP) in_heap = plx_all_in_heap(g, offset);
    g->phase++;
    at += g->stage_bytes;
  } while (at < longest && !in_heap);
  if (code == PLX_OK && in_heap) code = gather_in_heap(g, w, in, out, bytes, at, offset, keep);
  return plx_finish(g, record, &call, code);
}

int plx_scatter(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *const *in, void *out,
                size_t bytes, int dtype, int root) {
  if (root < 0 || root >= (int)g->world) return PLX_INVALID;
  struct plx_call call;
  int code = plx_begin(g, w, o, &call, PLX_SCATTER, bytes, dtype, PLX_SUM, root);
  if (code != PLX_OK) return code;
  struct plx_record *record = plx_record_enter(g, &call, o, -1);
  size_t part = g->stage_bytes / g->world / 64 * 64, at = 0;
  do {
    size_t n = plx_min(part, bytes - at);
    if (at == 0) plx_publish(g, &call);
    for (uint32_t r = 0; (uint32_t)root == g->rank && r < g->world; r++)
      if (r != g->rank) plx_copy(plx_stage_of(g, g->rank, g->phase) + r * part, (const char *)in[r] + at, n);
    code = at == 0 ? plx_sync_calls(g, w, &call) : plx_sync(g, w);
    if (code != PLX_OK) break;
    if ((uint32_t)root == g->rank)
      plx_copy((char *)out + at, (const char *)in[g->rank] + at, n);
    else
      plx_copy((char *)out + at, plx_stage_of(g, (uint32_t)root, g->phase) + g->rank * part, n);
    g->phase++;
    at += n;
  } while (at < bytes);
  return plx_finish(g, record, &call, code);
}

int plx_all_to_all(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *const *in,
                   const size_t *in_bytes, void *const *out, const size_t *out_bytes, int dtype, int splits) {
  /* The stage begins with the table of sizes, one for each destination; then one part per other rank. */
  size_t table = ((size_t)g->world * sizeof(uint64_t) + 63) / 64 * 64, others = g->world > 1 ? g->world - 1 : 1;
  size_t part = (g->stage_bytes - table) / others / 64 * 64;
  /* With splits on any rank, totals need not agree; the table is compared instead. Even calls agree on the count. */
  struct plx_call call;
  int code = plx_begin(g, w, o, &call, PLX_ALL_TO_ALL, splits ? 0 : in_bytes[0], dtype, PLX_SUM, -1);
  if (code != PLX_OK) return code;
  call.flags |= splits ? PLX_FLAG_SPLITS : 0;
  struct plx_record *record = plx_record_enter(g, &call, o, -1);
  size_t at = 0, longest = 0;
  do {
    unsigned char *mine = plx_stage_of(g, g->rank, g->phase);
    if (at == 0) {
      plx_publish(g, &call);
      for (uint32_t r = 0; r < g->world; r++) ((uint64_t *)mine)[r] = in_bytes[r];
    }
    for (uint32_t r = 0; r < g->world; r++)
      if (r != g->rank && at < in_bytes[r])
        plx_copy(mine + table + (r - (r > g->rank)) * part, (const char *)in[r] + at, plx_min(part, in_bytes[r] - at));
    if (at == 0) {
      code = plx_sync(g, w);
      if (code != PLX_OK) break;
      int uneven = 0, fits = 1;
      struct plx_call expected = call;
      for (uint32_t r = 0; r < g->world; r++) {
        const struct plx_call *theirs = &plx_rank_of(g, r)->call[g->phase & 1];
        if (theirs->kind == PLX_ALL_TO_ALL) uneven |= (theirs->flags & PLX_FLAG_SPLITS) != 0;
      }
      for (uint32_t r = 0; r < g->world; r++) {
        const struct plx_call *theirs = &plx_rank_of(g, r)->call[g->phase & 1];
        const uint64_t *sizes = (const uint64_t *)plx_stage_of(g, r, g->phase);
        fits &= theirs->seq == expected.seq && theirs->kind == expected.kind && theirs->dtype == expected.dtype &&
                (uneven || theirs->count == expected.count);
        for (uint32_t d = 0; fits && d < g->world; d++) longest = sizes[d] > longest ? sizes[d] : longest;
        fits = fits && sizes[g->rank] == out_bytes[r];
      }
      if (!fits) {
        code = plx_poison(g, PLX_MISMATCH, g->rank);
        break;
      }
      if (uneven) { /* the receiver alone sees a wrong size: let it speak before anybody writes */
        code = plx_sync(g, w);
        if (code == PLX_OK) code = plx_poisoned(g, w);
      }
    } else {
      code = plx_sync(g, w);
    }
    if (code != PLX_OK) break;
    if (at < in_bytes[g->rank])
      plx_copy((char *)out[g->rank] + at, (const char *)in[g->rank] + at, plx_min(part, in_bytes[g->rank] - at));
    for (uint32_t i = 1; i < g->world; i++) {
      uint32_t r = (g->rank + i) % g->world;
      if (at < out_bytes[r])
        plx_copy((char *)out[r] + at, plx_stage_of(g, r, g->phase) + table + (g->rank - (g->rank > r)) * part,
                 plx_min(part, out_bytes[r] - at));
    }
    g->phase++;
    at += part;
  } while (at < longest);
  return plx_finish(g, record, &call, code);
}
