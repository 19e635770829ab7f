/* In this broadcast the root waits for nobody: the phase is left open, and waited for when the next collective begins.
 *
 *             root                                      another rank
 *   phase t    publish, copy in, arrive; goes on         publish, arrive, wait for the root alone, copy out; goes on
 *   ...       a round of gradients, say: no phase of the group's
 *   phase t+1  wait for everybody at the sync of t,      the same
 *             compare all calls of t; then this phase
 *
 * The root's bytes lie in its stage of phase t, or in one of two areas of its heap that alternate as the stages do. Both
 * are written again in phase t + 2 at the earliest, behind the sync of t + 1, at which a rank arrives when it has copied
 * out. So the proof of layout.h holds as it stands: only *when* a rank waits at the sync of t has changed, and nothing
 * that it does in between writes what others read.
 *
 * A reader compares its call with the root's before it copies; whoever comes next to a collective compares all. So a rank
 * that called something else is noticed by itself at once, and by the others at their next collective, of which nothing
 * has happened by then. What is told is the broadcast: it is the line of the recorder that gets the status. Whoever stands
 * at the end of a round of gradients meanwhile has reached the sync of t, and is judged by that as ever (reducer.h).
 */
#ifndef PLX_EARLY_H
#define PLX_EARLY_H

#include "wait.h"

/* Overwrite `data` (bytes long) with root's, on every rank. The root returns at once, the others as soon as the root has
 * come. More than a stage goes through `area`, on the root an address in its heap with room for it; the call after the
 * next may use it again, no other. `number` must be the same on all ranks. */
int plx_broadcast_buffers(struct plx_group *g, struct plx_wait *w, const struct plx_origin *o, void *data, size_t bytes,
                          void *area, int dtype, int root, uint64_t number);

#endif
