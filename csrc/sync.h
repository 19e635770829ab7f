/* Ranks meet in only one way, a sync, and all collectives are made of syncs. */
#ifndef PLX_SYNC_H
#define PLX_SYNC_H

#include "wait.h"

/* Reach the next sync and wait until every rank has reached it. It is a release before, and an acquire after. */
int plx_sync(struct plx_group *g, struct plx_wait *w);
/* These are the two halves: reach it, then wait for all ranks (plx_await), or only for what `peer` did before it reached
 * it. */
int plx_arrive(struct plx_group *g, struct plx_wait *w);
int plx_await(struct plx_group *g, struct plx_wait *w, uint64_t step);
int plx_await_rank(struct plx_group *g, struct plx_wait *w, uint32_t peer, uint64_t step);

#endif
