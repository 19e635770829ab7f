/* A rank waits by these: the clock, a pause, and words that the kernel can put a thread to sleep on. */
#ifndef PLX_FUTEX_H
#define PLX_FUTEX_H

#include <stdatomic.h>
#include <stdint.h>

/* Return the time of CLOCK_MONOTONIC. */
uint64_t plx_now_ns(void);
/* Pause between two looks at memory. */
static inline void plx_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Sleep until some thread wakes the word, if it still holds `seen`, and at most for a while; it may return early. */
void plx_futex_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns);
void plx_futex_wake_all(_Atomic uint32_t *word);
/* Return the futex word of a 64-bit counter, which is its low half. */
static inline _Atomic uint32_t *plx_low_half(_Atomic uint64_t *word) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  return (_Atomic uint32_t *)word + 1;
#else
  return (_Atomic uint32_t *)word;
#endif
}

#endif
