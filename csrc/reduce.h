/* Combine n sources into one destination, element by element, always in the order of the sources. */
#ifndef PLX_REDUCE_H
#define PLX_REDUCE_H

#include "layout.h"

/* dst may be one of the sources; other overlaps are not allowed. All pointers are aligned to the element or not at all:
 * any alignment works. Half types accumulate in float32 and round once; small integers average in 64 bits. */
typedef void (*plx_reduce_fn)(void *dst, const void *const *src, uint32_t n, size_t count);

/* Return the kernel for this machine, or NULL where the combination has no meaning (MIN of complex, BAND of floats). */
plx_reduce_fn plx_reduce_kernel(int dtype, int redop);

size_t plx_dtype_size(int dtype);

#endif
