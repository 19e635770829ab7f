/* This file computes CRC-32 by a table, and 64 bytes at a time by the CPU's multiplication of polynomials.
 *
 * A CRC is the remainder of the message, read as a polynomial over GF(2). So a block B that lies d bits before the end
 * of a message can be replaced by (B * x^d mod P): it is folded into the block d bits later. Four accumulators of 128
 * bits fold over 512 bits each, then into one another, then over 128 bits. Each half of an accumulator has its own
 * constant: x^(d+32) and x^(d-32) modulo P, bits reflected and shifted by one, since the product of two reflected
 * numbers is one bit short. The last 16 bytes are a message with the same remainder, which the table finishes.
 *
 * Source: Gopal et al. (2009), Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction.
 */
#include "crc32.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define PLX_X86 1
#endif

void plx_crc32_table(uint32_t table[256]) {
  for (uint32_t i = 0; i < 256; i++) {
    table[i] = i;
    for (int bit = 0; bit < 8; bit++) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xedb88320u : 0);
  }
}

/* Continue from `state`, the inverse of a CRC. */
static uint32_t by_table(const uint32_t table[256], uint32_t state, const unsigned char *data, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) state = state >> 8 ^ table[(state ^ data[i]) & 0xff];
  return state;
}

#ifdef PLX_X86
__attribute__((target("pclmul,sse4.1"))) static inline __m128i fold(__m128i block, __m128i later, __m128i powers) {
  __m128i low = _mm_clmulepi64_si128(block, powers, 0x00), high = _mm_clmulepi64_si128(block, powers, 0x11);
  return _mm_xor_si128(later, _mm_xor_si128(low, high));
}

/* Continue from `state` over 64 bytes or more, a multiple of 16. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t by_folding(const uint32_t table[256], uint32_t state,
                                                                    const unsigned char *data, size_t bytes) {
  const __m128i over_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4); /* x^480, x^544 */
  const __m128i over_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0); /* x^96, x^160 */
  const __m128i *block = (const __m128i *)data, *end = (const __m128i *)(data + bytes);
  __m128i part[4];
  for (int i = 0; i < 4; i++) part[i] = _mm_loadu_si128(block + i);
  part[0] = _mm_xor_si128(part[0], _mm_cvtsi32_si128((int)state));
  for (block += 4; end - block >= 4; block += 4)
    for (int i = 0; i < 4; i++) part[i] = fold(part[i], _mm_loadu_si128(block + i), over_512);
  for (int i = 1; i < 4; i++) part[0] = fold(part[0], part[i], over_128);
  for (; block < end; block++) part[0] = fold(part[0], _mm_loadu_si128(block), over_128);
  unsigned char last[16];
  _mm_storeu_si128((__m128i *)last, part[0]);
  return by_table(table, 0, last, sizeof last);
}
#endif

int plx_crc32_is_fast(void) {
#ifdef PLX_X86
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#else
  return 0;
#endif
}

uint32_t plx_crc32(const uint32_t table[256], uint32_t crc, const void *data, size_t bytes) {
  const unsigned char *at = data;
  uint32_t state = ~crc;
#ifdef PLX_X86
  if (bytes >= 64 && plx_crc32_is_fast()) {
    size_t folded = bytes & ~(size_t)15;
    state = by_folding(table, state, at, folded);
    at += folded;
    bytes -= folded;
  }
#endif
  return ~by_table(table, state, at, bytes);
}
