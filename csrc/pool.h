/* Gradients lie in shared memory from the moment autograd writes them: while a backward runs, torch's allocator gets
 * blocks of a pool for tensors of exactly the sizes that the pool serves.
 *
 *   torch    c10::alloc_cpu(n)      n is a size of the pool, this thread is inside a backward: a block
 *            c10::free_cpu(p)       p lies in a pool: the block is free again; its pages stay
 *
 *   pool     | block | block | block | ...          placed one after the other; each has one size for ever
 *
 * Both calls are interposed in torch's own libraries, once per process, when the first pool is made. What the pool has
 * no block for goes to torch's functions as ever, and from there to the C library, whose functions are not touched: a
 * memory profiler that puts its own in the place of `free`, before us or after us, never sees a block of a pool, which
 * it would hand to the C library. All bookkeeping is in private memory: a forked child that frees an inherited tensor
 * changes nothing of its parent's.
 */
#ifndef PLX_POOL_H
#define PLX_POOL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

struct plx_pool;

/* Make a pool over `bytes` of memory at `base` that serves tensors of the `count` given sizes, each as often as `most`
 * says at the same time. The result is NULL with errno: ENOSYS where torch's allocator can't be interposed, else ENOMEM. */
struct plx_pool *plx_pool_new(void *base, size_t bytes, const size_t *sizes, const size_t *most, size_t count);
/* From here to `leave`, let this thread's tensors come from the pool. Only one pool serves at a time. Return whether the
 * thread was inside already; -1, and it is inside no pool, when other code has taken our place in torch's libraries
 * since. */
int plx_pool_enter(struct plx_pool *pool);
void plx_pool_leave(void);
/* Return the number of blocks that tensors use. */
size_t plx_pool_used(struct plx_pool *pool);
/* Free the pool's bookkeeping, if no tensor uses a block. Return whether it did. */
int plx_pool_delete(struct plx_pool *pool);
/* Note, in a forked child, that no lock is held and no thread is inside a backward. */
void plx_pools_after_fork(void);

#endif
