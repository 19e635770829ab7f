/* Included before every source of the core: each atomic operation becomes a point at which another thread may run. */
#ifndef POINTS_H
#define POINTS_H

#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

void explore_point(const volatile void *word);
void explore_look(const volatile void *word);
void explore_changed(const volatile void *word);
int explore_wakes_only(const volatile void *word);
void explore_sleep(void);
int explore_is_dead(int rank);
void *explore_scratch(size_t bytes);

#undef atomic_load_explicit
#define atomic_load_explicit(word, order)     \
  __extension__({                             \
    explore_look(word);                       \
    __auto_type word_ = (word);               \
    __typeof__((void)0, *word_) value_;       \
    __atomic_load(word_, &value_, (order));   \
    value_;                                   \
  })

#undef atomic_store_explicit
#define atomic_store_explicit(word, value, order)                  \
  __extension__({                                                  \
    explore_point(word);                                           \
    __auto_type word_ = (word);                                    \
    __typeof__((void)0, *word_) new_ = (value), old_;              \
    __atomic_load(word_, &old_, __ATOMIC_SEQ_CST);                 \
    __atomic_store(word_, &new_, (order));                         \
    if (old_ != new_) explore_changed(word_);                      \
  })

#define EXPLORE_ADD(word, value, order)                                                  \
  __extension__({                                                                        \
    explore_point(word);                                                                 \
    __auto_type sum_ = (word);                                                           \
    __typeof__((void)0, *sum_) added_ = 0;                                               \
    if (!explore_wakes_only(sum_)) {                                                     \
      added_ = __atomic_fetch_add(sum_, (value), (order));                               \
      explore_changed(sum_);                                                             \
    }                                                                                    \
    added_;                                                                              \
  })
#undef atomic_fetch_add_explicit
#define atomic_fetch_add_explicit(word, value, order) EXPLORE_ADD(word, value, order)
#undef atomic_fetch_sub_explicit
#define atomic_fetch_sub_explicit(word, value, order) EXPLORE_ADD(word, -(value), order)

#undef atomic_compare_exchange_strong_explicit
#define atomic_compare_exchange_strong_explicit(word, expected, value, yes, no)                                    \
  __extension__({                                                                                                  \
    explore_point(word);                                                                                           \
    __auto_type exchanged_ = (word);                                                                               \
    __typeof__((void)0, *exchanged_) wanted_ = (value);                                                            \
    int done_ = __atomic_compare_exchange(exchanged_, (expected), &wanted_, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
    if (done_) explore_changed(exchanged_);                                                                        \
    done_;                                                                                                         \
  })

/* Whoever waits looks again when anything has changed; there is no time. */
#define PLX_LOOKS 1
#define PLX_LOOKS_OVERSUBSCRIBED 1
#define PLX_JUDGE_NS 0
#define PLX_MAX_WORLD 4u
#define syscall(number, word, operation, value, timeout, ...) \
  ((void)(word), (void)(value), (void)(timeout), (operation) == FUTEX_WAIT ? explore_sleep() : (void)0)
#define sched_yield() explore_sleep()
#define clock_gettime(clock, t) ((t)->tv_sec = 0, (t)->tv_nsec = 0)
#define poll(p, n, timeout) explore_is_dead((p)->fd)
#define calloc(n, bytes) explore_scratch((n) * (bytes))
#define free(p) ((void)(p))

#endif
