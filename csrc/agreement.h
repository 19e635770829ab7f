/* Ranks agree before they act: each publishes its call, all meet, all compare.
 *
 * A policy may let ranks be out of some calls (uneven.h); it is asked on both sides of the comparison. What it answers must
 * follow from the calls of the phase alone, which all ranks read behind the same sync, so that all come to the same answer.
 */
#ifndef PLX_AGREEMENT_H
#define PLX_AGREEMENT_H

#include "sync.h"

/* The policy says which ranks need not take part. */
struct plx_policy {
  /* This is asked after a call's first sync, before the calls are compared: PLX_OK to compare them, or what becomes of
   * the call. */
  int (*check_participation)(struct plx_group *g, const struct plx_call *mine);
  /* This is asked after they were found equal: PLX_OK, or what must come before this call. */
  int (*check_return)(struct plx_group *g, const struct plx_call *mine);
  int apart;         /* some rank has been out of a call since all met */
  uint32_t num_gone; /* ranks that have left in order; they publish nothing */
};

/* Publish `call` for this phase. */
void plx_publish(struct plx_group *g, const struct plx_call *call);
/* Return whether `rank` called the same in this phase; it has reached the phase's sync. */
int plx_calls_same(const struct plx_group *g, uint32_t rank, const struct plx_call *mine);
/* Compare every rank's call of this phase with ours. Call it only after the phase's sync. */
int plx_agree(struct plx_group *g, const struct plx_call *mine);
/* Wait at the sync that ends the first phase's writes; then compare all calls, before any rank writes an output. */
int plx_sync_calls(struct plx_group *g, struct plx_wait *w, const struct plx_call *call);

/* Leave the phase open, whose sync we have reached: `call` is compared with the others' later. `record` is its line. */
void plx_leave_open(struct plx_group *g, const struct plx_call *call, struct plx_record *record, uint64_t recorded);
/* Wait at the sync of the phase that was left open, and compare the calls. PLX_OK if none was. */
int plx_close_phase(struct plx_group *g, struct plx_wait *w);

/* These ask the policy the two questions, for a caller that compares calls by itself. */
static inline int plx_check_participation(struct plx_group *g, const struct plx_call *mine) {
  return g->policy != NULL ? g->policy->check_participation(g, mine) : PLX_OK;
}
static inline int plx_check_return(struct plx_group *g, const struct plx_call *mine) {
  return g->policy != NULL ? g->policy->check_return(g, mine) : PLX_OK;
}

#endif
