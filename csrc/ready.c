/* This file waits for descriptors; the contract is in ready.h. */
#include "ready.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>

#include "futex.h"

static int look(struct pollfd *fds, int timeout_ms) {
  int found = poll(fds, fds[1].fd < 0 ? 1 : 2, timeout_ms);
  if (found < 0) return -errno;
  return (fds[0].revents != 0) | (fds[1].fd >= 0 && fds[1].revents != 0) << 1;
}

int plx_wait_ready(int fd, int bell, uint64_t spin_ns, int timeout_ms) {
  struct pollfd fds[2] = {{fd, POLLIN, 0}, {bell, POLLIN, 0}};
  if (spin_ns > 0) {
    uint64_t end_ns = plx_now_ns() + spin_ns;
    do {
      int found = look(fds, 0);
      if (found != 0) return found;
      sched_yield();
    } while (plx_now_ns() < end_ns);
  }
  return look(fds, timeout_ms);
}
