/* This file copies cache lines that another core has in its cache.
 *
 * From a few kilobytes on, the C library copies with the processor's string instruction. On Intel's (Cascade Lake) it is
 * slow where lines come from, or belong to, another core: plain loads and stores, with both sides asked for early, hand
 * 64 MiB over in 0.7 of its time (out of the first-level cache it is the other way round). On AMD's (Zen 5) the same
 * instruction takes a line that is written as a whole without asking its owner for what stands there, which any store
 * does: collectives from 64 KiB on take 0.35 to 0.65 of the time with it (benchmarks/collectives, "Floors").
 */
#include "copy.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

#define LINE 64u
#define FROM_BYTES 12288u /* up to here the C library takes as long or less */
#define AHEAD 1024u       /* 512 to 2048 are equal; hints, so it does not matter what lies behind the end */

/* Copy whole lines; `to` starts one. Processors that do not know "prefetch for writing" take it for no operation. */
__attribute__((target("prfchw"))) static void copy_lines(unsigned char *to, const unsigned char *from, size_t n) {
  for (size_t at = 0; at < n; at += LINE) {
    __builtin_prefetch((const void *)((uintptr_t)from + at + AHEAD), 0, 3);
    __builtin_prefetch((const void *)((uintptr_t)to + at + AHEAD), 1, 3);
    const __m128i *source = (const __m128i *)(from + at);
    __m128i *target = (__m128i *)(to + at);
    __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1), c = _mm_loadu_si128(source + 2),
            d = _mm_loadu_si128(source + 3);
    _mm_store_si128(target, a);
    _mm_store_si128(target + 1, b);
    _mm_store_si128(target + 2, c);
    _mm_store_si128(target + 3, d);
  }
}
#endif

void plx_copy_by_stores(void *to, const void *from, size_t n) {
  if (n == 0 || to == from) return;
#if defined(__x86_64__)
  if (n >= FROM_BYTES) {
    size_t head = (LINE - (uintptr_t)to % LINE) % LINE, lines = (n - head) / LINE * LINE;
    memcpy(to, from, head);
    copy_lines((unsigned char *)to + head, (const unsigned char *)from + head, lines);
    size_t done = head + lines;
    memcpy((unsigned char *)to + done, (const unsigned char *)from + done, n - done);
    return;
  }
#endif
  memcpy(to, from, n);
}

void plx_copy(void *to, const void *from, size_t n) {
#if defined(__x86_64__)
  if (!__builtin_cpu_is("amd")) {
    plx_copy_by_stores(to, from, n);
    return;
  }
#endif
  if (n != 0 && to != from) memcpy(to, from, n);
}
