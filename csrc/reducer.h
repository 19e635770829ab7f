/* A reducer of buckets reduces gradients of the shared heap where they are, each as soon as all ranks have it, by any
 * rank that looks. It needs no thread, queue or copy.
 *
 *             rank 0's heap          rank 1's heap
 *   flags     ready[b] done[b]       ready[b] done[b]      one line per bucket; written by the owner only
 *   bucket b  [ slice 0 | slice 1 ]  [ slice 0 | slice 1 ]   at an offset of its own in each heap, said with the flag
 *
 *   rank r, bucket b:  ready[b] = round                         "my gradients of b are complete"
 *   whenever rank r looks (poll): if ready[b] == round on every rank, r reads slice r of all heaps, adds them up in
 *                      the order of the ranks, writes the result to slice r of all heaps; done[b] = round
 *   at the end:        wait until done[b] == round on every rank, for all b
 *
 *   Where each rank needs a slice of its own only (a sharded optimizer), r reads that slice of all heaps and writes it
 *   to its own.
 *
 * A bucket's slices are written by one rank each, and read by others only before its owner wrote them (ready, not done)
 * or after (done everywhere), so no byte is ever read while it is written.
 *
 * A round passes no sync, so at its end a rank must find out by itself whether another will never come: it looks at what
 * the other has *issued*, against what it has issued itself. A rank's program issues its calls in one order, the ends of
 * rounds among them; some collectives are carried out later, by another thread of the rank (plx_issue). We stand at the
 * end of round k; rank r has not done all of its part of it.
 *
 *   1  r's program has not come to the end of its round k: it leaves that only when all is done, its own part too.
 *   2  All that our program issued before the end of the round is carried out (not plx_is_behind), and it issues nothing
 *      while it waits here: the syncs that we have reached are those of the calls that it makes before the end of round k.
 *   3  So if r has reached more syncs, it has issued a call before the end of its round k that we shall issue after the
 *      end of ours: the programs differ. If it has not, nothing can be said: r may be slow, or it
 *      waits at a sync that some thread of ours, or of a third rank, will reach.
 *   4  If r's program stands at the end of another reducer's round, in which something of ours is missing, then it waits
 *      for us there and we wait for it here: the programs differ.
 *
 * Step 2 is what this lacked at first: our syncs, which the other thread reaches late, were compared with r's at once, and
 * one asynchronous all_reduce beside a backward was enough for a false alarm. While we are behind, nobody is judged but
 * the dead; that thread waits for nobody for ever: where the calls in its line differ, their sync tells (plx_agree).
 * Nobody waits for ever: of ranks that wait for each other, take the one that has issued the fewest calls. If it waits at
 * a sync, those that it waits for are at ends of rounds with the same number of calls, so they are not behind, and find it
 * at a sync beyond theirs; if it waits at the end of a round, it finds one that is beyond, by 3, or all are at ends of
 * rounds, and two of them at those of different reducers, by 4. A rank that has gone on from a phase which it left open
 * (early.h) has reached that phase's sync, and is found there by those who have not; it waits for them, if at all, at that
 * same sync. tests/csrc/interleavings tries it.
 */
#ifndef PLX_REDUCER_H
#define PLX_REDUCER_H

#include "reduce.h"
#include "wait.h"

struct plx_flags { /* they lie in the heap, one per bucket and rank */
  _Alignas(PLX_LINE) _Atomic uint32_t ready;
  _Atomic uint32_t done;
  uint64_t offset; /* where in its heap this rank has the bucket in this round; written before `ready` */
};

struct plx_bucket {
  uint64_t count; /* elements */
  size_t width;    /* bytes per element */
  plx_reduce_fn kernel;
  int reduced; /* our slice is reduced in this round */
  /* These say which elements this rank alone needs in this round; where `all` is set, every rank needs all. */
  int all;
  uint64_t start, stop;
};

struct plx_reducer {
  struct plx_group *g;
  uint64_t flags; /* the offset of num_buckets struct plx_flags, then of one bell, in the heap; zeroed at first */
  uint32_t num_buckets;
  uint32_t round;
  uint32_t left;  /* the buckets of this round whose slice we still owe */
  struct plx_bucket *buckets;
};

size_t plx_reducer_bytes(uint32_t num_buckets);

/* Begin a round: all buckets are ours to fill. Call it only after the last round has finished. */
void plx_reducer_begin(struct plx_reducer *b);
/* Note that our part of the bucket is complete, and lies at `offset` of our heap, until the round has finished. */
int plx_reducer_ready(struct plx_reducer *b, uint32_t bucket, uint64_t offset);
/* Note the same, where this rank needs only elements `start` to `stop` of the result. All ranks say so, or none:
 * together they need every element once. */
int plx_reducer_ready_slice(struct plx_reducer *b, uint32_t bucket, uint64_t offset, uint64_t start, uint64_t stop);
/* Reduce our slice of every bucket that all ranks have. It never waits. Return how many slices we still owe. */
uint32_t plx_reducer_poll(struct plx_reducer *b);
/* Wait until all slices of all buckets are done by everybody. All buckets must be ready here. */
int plx_reducer_finish(struct plx_reducer *b, struct plx_wait *w);

#endif
