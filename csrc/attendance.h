/* Who takes part: a rank that has run out of data waits at another collective, or has left, while others train on.
 *
 *            rank 0 (trains)          rank 1 (trains)          rank 2 (no more data)
 *   gate t   step's all_gather        step's all_gather        barrier                   all see all calls: apart
 *   gate t+1 the same again           the same again           it too, with zeros
 *   gate t+2 gradients                gradients                barrier                   apart
 *   gate t+3 the same again           the same again           waits
 *            reduce over 0 and 1      reduce over 0 and 1
 *   gate t+4 done                     done                     done
 *   gate t+5 barrier                  barrier                  barrier                   all wait, and some were out:
 *            Python brings weights up to date, then the barrier is called again          they meet again
 *
 * Calls have a role (PLX_FLAG_*): part of a training step, or something that the rank waits for. What follows depends
 * on nothing but the calls of one turn, which all ranks read after the same gate; so all come to the same answer:
 *
 *   all wait                         compared as ever; if some were out since the last time: PLX_REJOIN at one line of
 *                                    the program, PLX_MISMATCH at several: who waited there had not run out of data
 *   some step, some wait             PLX_APART: those who step call again; those who wait stand in first, with zeros
 *   all step or stand in             compared as ever
 *   some step, a call in background  PLX_MISMATCH: its rank may be anywhere, also in the same step
 *
 * Whoever waits at a gate goes nowhere until all have come, so "rank 2 is out" holds for as long as it matters. That is
 * so of a rank whose *program* waits there; another thread of a rank may stand at a gate for a call in background while the
 * program goes on, and may have reached fewer gates than the program has issued. So gates are compared with those of a
 * rank that has carried out all it issued (board.h), and a call in background is no place to be out at. A rank
 * that left in order (`left_after` gates, none of its rounds open) took part in a turn if it had reached its gate by
 * then: also that is the same for whoever looks, whenever it looks.
 *
 * Zeros are neutral for the step's own collectives: counts, sums, flags combined by MAX. A broadcast from a rank that
 * is out comes from the lowest that is not. A rank that left can't write zeros: the lowest that steps writes them into
 * its stages, once, after a gate that tells that nobody reads them any more; and whoever reduces reads all stages
 * itself, since that rank's slice would be nobody's.
 */
#ifndef PLX_ATTENDANCE_H
#define PLX_ATTENDANCE_H

#include "board.h"
#include "collectives.h"

/* Whether `rank` had left in order before `step`, the gate that we have just passed. */
int plx_gone(const struct plx_group *g, uint32_t rank, uint64_t step);
/* After the first gate of a call, with g->uneven: PLX_OK to go on and compare, PLX_APART, or what ends the group. */
int plx_roll_call(struct plx_group *g, const struct plx_call *mine);
/* After the calls were found equal: PLX_REJOIN if all wait at this line and some were out; PLX_OK if nobody was. */
int plx_meet(struct plx_group *g, const struct plx_call *mine);
/* After PLX_APART, before the same call again: what this rank does meanwhile, in the step or out of it. */
int plx_stand_in(struct plx_group *g, struct plx_wait *w);
/* The call that was apart will not be made again. */
void plx_give_up(struct plx_group *g, int code);
/* Root of a broadcast in a step: `root` itself, or the lowest rank that steps. */
int plx_present_root(const struct plx_group *g, int root);
/* The end of a round of gradients while somebody is out: the mean over those who step. All buckets are ready here. */
int plx_board_meet(struct plx_board *b, struct plx_wait *w, const struct plx_origin *o);
/* No rank may miss us from now on. */
void plx_leave_in_order(struct plx_group *g);

#endif
