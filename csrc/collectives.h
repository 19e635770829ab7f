/* Each collective is one call: every rank of the group makes the same call, in the same order.
 *
 * Each returns a plx_status. On PLX_MISMATCH no output was written; on any other failure outputs are undefined and the
 * group is over. `in` and `out` may be the same where it says so; partial overlaps are not allowed. Sizes may be zero.
 * P is the number of ranks, S the bytes of one rank's tensor, C the bytes of a stage.
 */
#ifndef PLX_COLLECTIVES_H
#define PLX_COLLECTIVES_H

#include "wait.h"

/* Meet at one sync. */
int plx_barrier(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o);

/* Write the reduction over ranks of `in`, in the order of the ranks, to `out`, on every rank (root < 0) or on `root`
 * only. in == out is allowed. There is one sync per C bytes when P == 2 or S is small, and there are two per C bytes
 * otherwise. Tensors that lie in their ranks' heaps, at whatever offsets, are reduced where they are: two syncs, and
 * nothing is staged. */
int plx_all_reduce(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *in, void *out,
                   size_t count, int dtype, int redop, int root);

/* counts[r] elements of every rank's `in` belong to rank r; in[r] is where they lie. Write their reduction, counts[rank]
 * elements, to `out`, which may be in[rank]. */
int plx_reduce_scatter(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *const *in,
                       const size_t *counts, void *out, int dtype, int redop);

/* Write rank r's `in` to out[r], which is bytes[r] long. `in` may be out[rank]. `out` is used on `root` only, or
 * everywhere if root < 0. */
int plx_gather(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *in, void *const *out,
               const size_t *bytes, int dtype, int root);

/* Overwrite `data` (bytes long) with root's. */
int plx_broadcast(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, void *data, size_t bytes,
                  int dtype, int root);

/* Write root's in[rank] to `out` (bytes long); `in` is used on the root only. */
int plx_scatter(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *const *in, void *out,
                size_t bytes, int dtype, int root);

/* Write rank r's in[rank] (in_bytes[rank] long) to out[r] (out_bytes[r] long). With `splits` the sizes may differ
 * between pairs; then one more sync makes sure that every sender's and receiver's sizes agree before anything is
 * written. */
int plx_all_to_all(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, const void *const *in,
                   const size_t *in_bytes, void *const *out, const size_t *out_bytes, int dtype, int splits);

#endif
