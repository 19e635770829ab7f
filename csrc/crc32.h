/* CRC-32 as zip files and zlib have it: polynomial 0xedb88320, bits reflected, begun with ones and inverted. */
#ifndef CRC32_H
#define CRC32_H

#include <stddef.h>
#include <stdint.h>

/* Fill the table that plx_crc32 needs. */
void plx_crc32_table(uint32_t table[256]);
/* Return the CRC-32 of the bytes that have the CRC-32 `crc` (0 for none), followed by `bytes` more. */
uint32_t plx_crc32(const uint32_t table[256], uint32_t crc, const void *data, size_t bytes);
/* Return whether this CPU multiplies polynomials: 15 GB a second or more. The table alone gives less than 1. */
int plx_crc32_is_fast(void);

#endif
