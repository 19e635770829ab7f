/* This decides who takes part: a rank without more data waits at another collective, or has left, while others train.
 *
 *            rank 0 (trains)          rank 1 (trains)          rank 2 (no more data)
 *   sync t   step's all_gather        step's all_gather        barrier                   all see all calls: apart
 *   sync t+1 the same again           the same again           it too, with zeros
 *   sync t+2 gradients                gradients                barrier                   apart
 *   sync t+3 the same again           the same again           waits
 *            reduce over 0 and 1      reduce over 0 and 1
 *   sync t+4 done                     done                     done
 *   sync t+5 barrier                  barrier                  barrier                   all wait, and some were out:
 *            Python brings weights up to date, then the barrier is called again          they meet again
 *
 * Calls have a role (PLX_FLAG_*): part of a training step, or something that the rank waits for. What follows depends
 * on nothing but the calls of one phase, which all ranks read after the same sync; so all come to the same answer:
 *
 *   all wait                         compared as ever; if some were out since the last time: PLX_REJOIN at one line of
 *                                    the program, PLX_MISMATCH at several: who waited there had not run out of data
 *   some step, some wait             PLX_RETRY_UNEVEN: those who step call again; those who wait shadow them first, with zeros
 *   all step or shadow               compared as ever
 *   some step, a call in background  PLX_MISMATCH: its rank may be anywhere, also in the same step
 *
 * Whoever waits at a sync goes nowhere until all have come, so "rank 2 is out" holds for as long as it matters. That is
 * so of a rank whose *program* waits there; another thread of a rank may stand at a sync for a call in background while the
 * program goes on, and may have reached fewer syncs than the program has issued. So syncs are compared with those of a
 * rank that has carried out all it issued (reducer.h), and a call in background is no place to be out at. A rank
 * that left in order (`left_after` syncs, none of its rounds open) took part in a phase if it had reached its sync by
 * then: also that is the same for whoever looks, whenever it looks.
 *
 * Zeros are neutral for the step's own collectives: counts, sums, flags combined by MAX. A broadcast from a rank that
 * is out comes from the lowest that is not. A rank that left can't write zeros: the lowest that steps writes them into
 * its stages, once, after a sync that tells that nobody reads them any more; and whoever reduces reads all stages
 * itself, since that rank's slice would be nobody's.
 */
#ifndef PLX_ATTENDANCE_H
#define PLX_ATTENDANCE_H

#include "agreement.h"
#include "reducer.h"

/* It is what a rank knows of which ranks take part; it is all zeros at first. */
struct plx_uneven {
  struct plx_policy policy; /* it comes first: the group's policy is this */
  int newly_gone;
  uint64_t missed;                     /* rounds of gradients without everybody, since all met */
  unsigned char absent[PLX_MAX_WORLD]; /* whether each was out of the latest step */
  struct plx_call step_call;           /* the call of those in the step when we found that some are not */
};

/* From now on let training steps do without ranks that wait at another collective. All ranks say so together. */
void plx_allow_uneven(struct plx_group *g, struct plx_uneven *u);
/* Do, after PLX_RETRY_UNEVEN and before the same call again, what this rank does meanwhile, in the step or out of it. */
int plx_shadow_step(struct plx_group *g, struct plx_wait *w);
/* Return the root of a broadcast in a step: `root` itself, or the lowest rank that steps. */
int plx_present_root(const struct plx_group *g, int root);
/* End a round of gradients while some rank is out: take the mean over those that step. All buckets are ready here. */
int plx_reducer_finish_uneven(struct plx_reducer *b, struct plx_wait *w, const struct plx_origin *o);

#endif
