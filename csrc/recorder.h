/* The flight recorder has the last operations of a rank in shared memory, readable while it hangs and when it is dead. */
#ifndef PLX_RECORDER_H
#define PLX_RECORDER_H

#include "group.h"

/* An operation begins. Returns the record to pass to `leave`; in a quiet group one that nobody reads. Times are
 * CLOCK_MONOTONIC, to a microsecond or so. */
struct plx_record *plx_record_enter(struct plx_group *g, const struct plx_call *call, const struct plx_origin *o,
                                    int32_t peer);
/* End the operation with this enum plx_status. */
void plx_record_leave(struct plx_group *g, struct plx_record *record, int status);
/* End the operation long after: by now the line may tell of another one, and then stays as it is. `recorded` says how
 * many lines this rank had written when that was its last. */
void plx_record_leave_late(struct plx_group *g, struct plx_record *record, uint64_t recorded, int status);
/* Begin as `enter` does, in a quiet group too; `number` is that of the record, to pass to `end`, which may come much
 * later. */
struct plx_record *plx_record_begin(struct plx_group *g, const struct plx_call *call, const struct plx_origin *o,
                                    int32_t peer, uint64_t *number);
void plx_record_end(struct plx_group *g, uint64_t number, int status);
/* Return whether the line that was this rank's last after `recorded` ones is still that operation's. */
int plx_record_is_kept(struct plx_group *g, uint64_t recorded);
/* Copy the record that `owner` wrote as its `number`th, counted from 0; 0 if it is being written, or never was. */
int plx_record_read(const struct plx_rank *owner, uint64_t number, struct plx_record *copy);

#endif
