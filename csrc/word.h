/* A 64-bit word in shared memory says how far its owner has got with bytes beside it.
 *
 *   owner      writes bytes        word = n        writes other bytes
 *   reader                         sees n          reads the bytes
 *
 * A plain store would do on x86, where stores become visible in their order. On ARM they need not: a reader could see n
 * and the bytes of before (or the other bytes, and the word of before), and an undo that copies the wrong ones back leaves
 * parameters of no step at all. So the store releases what was written before it and lets nothing written after it pass;
 * the load keeps back every read that follows it. One instruction on x86, a barrier more on ARM. */
#ifndef PLX_WORD_H
#define PLX_WORD_H

#include <stdatomic.h>
#include <stdint.h>

static inline void plx_word_store(_Atomic uint64_t *word, uint64_t value) {
  atomic_store_explicit(word, value, memory_order_release);
#if !defined(__SANITIZE_THREAD__) /* ThreadSanitizer knows no fences, and needs none to see what is released */
  atomic_thread_fence(memory_order_seq_cst);
#endif
}

static inline uint64_t plx_word_load(const _Atomic uint64_t *word) {
  return atomic_load_explicit(word, memory_order_acquire);
}

/* Return what the word held; if that was `expected`, it holds `desired` from now on. Of several that try, one succeeds. */
static inline uint64_t plx_word_compare_exchange(_Atomic uint64_t *word, uint64_t expected, uint64_t desired) {
  atomic_compare_exchange_strong_explicit(word, &expected, desired, memory_order_seq_cst, memory_order_seq_cst);
  return expected;
}

#endif
