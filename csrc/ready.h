/* A thread waits here for descriptors that it expects to be ready at once. */
#ifndef PLX_READY_H
#define PLX_READY_H

#include <stdint.h>

/* Wait until `fd`, or `bell` (-1: none), can be read, or has ended: look again and again for `spin_ns`, and sleep only then.
 * A sleeping thread costs a wake-up, on an idle core of a virtual machine more than a whole call; one that looks lets
 * others run in between. `timeout_ms` < 0 never comes.
 * Returns 1 for the first, 2 for the second, 3 for both, 0 when time is up, -errno on failure (-EINTR: a signal). */
int plx_wait_ready(int fd, int bell, uint64_t spin_ns, int timeout_ms);

#endif
