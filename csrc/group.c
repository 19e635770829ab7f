/* A rank asks about its peers here, and ends a group. */
#include "group.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "futex.h"

unsigned char *plx_stage_of(const struct plx_group *g, uint32_t rank, uint64_t phase) {
  size_t own = (sizeof(struct plx_rank) + PLX_PAGE - 1) / PLX_PAGE * PLX_PAGE;
  size_t stage = g->over && rank == g->rank ? 2 : phase & 1;
  return (unsigned char *)plx_rank_of(g, rank) + own + stage * g->stage_bytes;
}

int plx_peer_alive(struct plx_group *g, uint32_t peer) {
  if (peer == g->rank) return 1;
  if (atomic_load_explicit(&plx_rank_of(g, peer)->life, memory_order_acquire) == PLX_LEFT) return 0;
  if (g->pidfds[peer] < 0) return 1;
  struct pollfd p = {g->pidfds[peer], POLLIN, 0};
  return poll(&p, 1, 0) <= 0;
}

#define EXITING 0x4ul /* PF_EXITING of Linux's include/linux/sched.h */
#define OTHER_THREADS_NS 500000l

/* Return whether a process is being ended by a signal or with an exit code, from its /proc/PID/stat. A main thread that
 * has ended alone has the code 0, and its process goes on. */
static int is_being_ended(int stat) {
  char line[1024];
  ssize_t n = pread(stat, line, sizeof line - 1, 0);
  if (n <= 0) return 0; /* it has been waited for: its pidfd tells */
  line[n] = '\0';
  const char *field = strrchr(line, ')'), *last = strrchr(line, ' '); /* the command's name may hold any character */
  for (int i = 0; field != NULL && i < 7; i++) field = strchr(field + 1, ' ');
  return field != NULL && (strtoul(field, NULL, 10) & EXITING) != 0 && strtol(last, NULL, 10) != 0;
}

int plx_peer_lost(struct plx_group *g, uint32_t peer) {
  if (!plx_peer_alive(g, peer)) return 1;
  if (peer == g->rank || g->stats == NULL || g->stats[peer] < 0 || !is_being_ended(g->stats[peer])) return 0;
  /* Its other threads end with it, once the kernel has interrupted their cores. */
  nanosleep(&(struct timespec){0, OTHER_THREADS_NS}, NULL);
  return 1;
}

int plx_poison(struct plx_group *g, int code, uint32_t rank) {
  uint64_t none = 0, mine = (uint64_t)code | (uint64_t)rank << 8;
  atomic_compare_exchange_strong_explicit(&g->header->poison, &none, mine, memory_order_acq_rel, memory_order_acquire);
  for (uint32_t r = 0; r < g->world; r++) {
    struct plx_rank *peer = plx_rank_of(g, r);
    plx_futex_wake_all(plx_low_half(&peer->step));
    atomic_fetch_add_explicit(&peer->bell, 1, memory_order_release);
    plx_futex_wake_all(&peer->bell);
  }
  plx_futex_wake_all(&g->header->synced);
  return (int)(atomic_load_explicit(&g->header->poison, memory_order_acquire) & 0xff);
}

void plx_issue(struct plx_group *g) { atomic_fetch_add_explicit(&g->issued, 1, memory_order_release); }

void plx_carried_out(struct plx_group *g) { atomic_fetch_add_explicit(&g->carried_out, 1, memory_order_release); }

int plx_is_behind(struct plx_group *g) {
  uint64_t issued = atomic_load_explicit(&g->issued, memory_order_acquire);
  return atomic_load_explicit(&g->carried_out, memory_order_acquire) != issued;
}
