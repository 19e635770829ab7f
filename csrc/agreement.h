/* Ranks agree before they act: each publishes its call, all meet, all compare. */
#ifndef PLX_AGREEMENT_H
#define PLX_AGREEMENT_H

#include "sync.h"

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

#endif
