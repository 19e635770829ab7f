/* This file gives torch's allocator pools of memory; the picture is in pool.h. */
#include "pool.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>

#include "interpose.h"
#include "layout.h"

#define MAX_POOLS 64 /* so many in one process */

struct plx_class { /* blocks of one size */
  size_t size;
  size_t most;   /* blocks at the same time */
  size_t placed; /* blocks so far */
  size_t num_free;
  unsigned char **free; /* room for `most` */
};

struct plx_block {
  size_t offset;
  size_t class;
};

struct plx_pool {
  _Atomic uintptr_t base;
  _Atomic size_t bytes; /* 0: no pool */
  size_t end;           /* the end of the last block */
  size_t used;
  size_t num_classes, num_blocks;
  struct plx_class *classes;
  struct plx_block *blocks; /* they are by offset; there is room for the sum of all `most` */
  atomic_flag lock;         /* held for a few instructions */
};

/* These are of the whole process, because what is interposed is: torch's allocator knows no pool. The pools themselves
 * are never freed: another thread may be looking whether its block is one of theirs. */
static struct {
  struct plx_pool pools[MAX_POOLS];
  _Atomic size_t num_pools; /* so many were ever used: the first ones */
  int interposed;
  struct plx_slots allocated, freed[2]; /* of libc10, which defines both functions; of libtorch_cpu, which also frees */
  void *(*alloc_cpu)(size_t);
  void (*free_cpu)(void *);
} process;

static _Thread_local struct plx_pool *current;

static void lock(struct plx_pool *p) {
  while (atomic_flag_test_and_set_explicit(&p->lock, memory_order_acquire)) sched_yield();
}

static void unlock(struct plx_pool *p) { atomic_flag_clear_explicit(&p->lock, memory_order_release); }

static unsigned char *take(struct plx_pool *p, size_t size) {
  unsigned char *block = NULL;
  size_t room = (size + PLX_PAGE - 1) / PLX_PAGE * PLX_PAGE;
  lock(p); /* before looking at the classes: another thread's backward may still hold a pool that is being deleted */
  for (size_t i = 0; i < p->num_classes; i++) {
    struct plx_class *c = &p->classes[i];
    if (c->size != size) continue;
    if (c->num_free > 0) {
      block = c->free[--c->num_free];
    } else if (c->placed < c->most && p->end + room <= p->bytes) {
      block = (unsigned char *)p->base + p->end;
      p->blocks[p->num_blocks++] = (struct plx_block){p->end, i};
      p->end += room;
      c->placed++;
    }
    if (block != NULL) p->used++;
    break;
  }
  unlock(p);
  return block;
}

static void give_back(struct plx_pool *p, unsigned char *block) {
  size_t offset = (uintptr_t)block - p->base, low = 0;
  lock(p);
  for (size_t high = p->num_blocks; high - low > 1;) {
    size_t middle = low + (high - low) / 2;
    if (p->blocks[middle].offset <= offset) low = middle;
    else high = middle;
  }
  struct plx_class *c = &p->classes[p->blocks[low].class];
  c->free[c->num_free++] = block;
  p->used--;
  unlock(p);
}

static void *our_alloc_cpu(size_t size) {
  struct plx_pool *p = current;
  unsigned char *mine = p != NULL ? take(p, size) : NULL;
  return mine != NULL ? mine : process.alloc_cpu(size);
}

static void our_free_cpu(void *block) {
  size_t n = atomic_load_explicit(&process.num_pools, memory_order_acquire);
  for (size_t i = 0; i < n; i++) {
    struct plx_pool *p = &process.pools[i];
    size_t bytes = atomic_load_explicit(&p->bytes, memory_order_acquire);
    if ((uintptr_t)block - atomic_load_explicit(&p->base, memory_order_relaxed) < bytes) {
      give_back(p, block);
      return;
    }
  }
  process.free_cpu(block);
}

/* These are c10::alloc_cpu(unsigned long) and c10::free_cpu(void*), as the Itanium C++ ABI spells them. */
#define ALLOC_CPU "_ZN3c109alloc_cpuEm"
#define FREE_CPU "_ZN3c108free_cpuEPv"

/* This is called under Python's lock, so by one thread at a time. */
static int interpose(void) {
  if (process.interposed) return 0;
  plx_find_slots("libc10.so", ALLOC_CPU, &process.allocated);
  plx_find_slots("libc10.so", FREE_CPU, &process.freed[0]);
  plx_find_slots("libtorch_cpu.so", FREE_CPU, &process.freed[1]);
  process.alloc_cpu = (void *(*)(size_t))(uintptr_t)process.allocated.definition;
  process.free_cpu = (void (*)(void *))(uintptr_t)process.freed[0].definition;
  errno = ENOSYS;
  if (process.alloc_cpu == NULL || process.free_cpu == NULL) return -1;
  /* The libraries that free come first: they must know our blocks before there are any. Without a pool both do what
   * torch's own do, so nothing is lost if the second can't be filled. */
  process.interposed = plx_fill_slots(&process.freed[0], (void *)(uintptr_t)our_free_cpu) == 0 &&
                       plx_fill_slots(&process.freed[1], (void *)(uintptr_t)our_free_cpu) == 0 &&
                       plx_fill_slots(&process.allocated, (void *)(uintptr_t)our_alloc_cpu) == 0;
  return process.interposed ? 0 : -1;
}

/* This costs a few loads. A block that is given out while other code is called to free it would end the process. */
static int is_interposed(void) {
  return plx_slots_hold(&process.allocated, (void *)(uintptr_t)our_alloc_cpu) &&
         plx_slots_hold(&process.freed[0], (void *)(uintptr_t)our_free_cpu) &&
         plx_slots_hold(&process.freed[1], (void *)(uintptr_t)our_free_cpu);
}

static void empty(struct plx_pool *p) {
  for (size_t i = 0; p->classes != NULL && i < p->num_classes; i++) free(p->classes[i].free);
  free(p->classes);
  free(p->blocks);
  p->classes = NULL;
  p->blocks = NULL;
  p->end = p->used = p->num_classes = p->num_blocks = 0;
}

static struct plx_pool *find_unused(void) {
  for (size_t i = 0; i < MAX_POOLS; i++) {
    if (atomic_load_explicit(&process.pools[i].bytes, memory_order_relaxed) != 0) continue;
    if (atomic_load_explicit(&process.num_pools, memory_order_relaxed) <= i)
      atomic_store_explicit(&process.num_pools, i + 1, memory_order_release);
    return &process.pools[i];
  }
  return NULL;
}

struct plx_pool *plx_pool_new(void *base, size_t bytes, const size_t *sizes, const size_t *most, size_t count) {
  if (interpose() != 0) return NULL;
  struct plx_pool *p = find_unused();
  if (p == NULL) {
    errno = ENOMEM;
    return NULL;
  }
  size_t blocks = 0;
  for (size_t i = 0; i < count; i++) blocks += most[i];
  p->blocks = calloc(blocks + 1, sizeof *p->blocks);
  p->classes = calloc(count + 1, sizeof *p->classes);
  int complete = p->classes != NULL && p->blocks != NULL;
  for (; complete && p->num_classes < count; p->num_classes++) {
    size_t i = p->num_classes;
    p->classes[i] = (struct plx_class){.size = sizes[i], .most = most[i], .free = calloc(most[i] + 1, sizeof(void *))};
    complete = p->classes[i].free != NULL;
  }
  if (!complete) {
    empty(p);
    errno = ENOMEM;
    return NULL;
  }
  atomic_store_explicit(&p->base, (uintptr_t)base, memory_order_relaxed);
  atomic_store_explicit(&p->bytes, bytes, memory_order_release);
  return p;
}

int plx_pool_enter(struct plx_pool *pool) {
  int inside = current == pool;
  current = is_interposed() ? pool : NULL;
  return current != NULL ? inside : -1;
}

void plx_pool_leave(void) { current = NULL; }

size_t plx_pool_used(struct plx_pool *pool) {
  lock(pool);
  size_t used = pool->used;
  unlock(pool);
  return used;
}

int plx_pool_delete(struct plx_pool *pool) {
  lock(pool);
  int unused = pool->used == 0;
  if (unused) {
    if (current == pool) current = NULL;
    atomic_store_explicit(&pool->bytes, 0, memory_order_release);
    empty(pool);
  }
  unlock(pool);
  return unused;
}

void plx_pools_after_fork(void) {
  current = NULL;
  for (size_t i = 0; i < MAX_POOLS; i++) unlock(&process.pools[i]);
}
