/* These functions copy between a rank's own memory and memory that ranks share. */
#ifndef PLX_COPY_H
#define PLX_COPY_H

#include <stddef.h>

/* Copy as memcpy does; `to` may be `from`, and n may be zero with any pointers. */
void plx_copy(void *to, const void *from, size_t n);

/* Copy in one of its ways, whatever the processor: by plain stores from a few kilobytes on. */
void plx_copy_by_stores(void *to, const void *from, size_t n);

#endif
