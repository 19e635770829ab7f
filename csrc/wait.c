/* Waits can end early; the contract is in wait.h. */
#include "wait.h"

#include "futex.h"

int plx_fail(struct plx_group *g, struct plx_wait *w, int code, uint32_t failed) {
  w->failed_rank = (int32_t)failed;
  /* For a lost peer this is the rank that is lost; all else is told with the rank that saw it. */
  return plx_poison(g, code, code == PLX_PEER_LOST ? failed : g->rank);
}

int plx_ask_caller(struct plx_group *g, struct plx_wait *w, uint64_t since_ns) {
  if (w->idle == NULL || w->idle(w->context, plx_now_ns() - since_ns) == 0) return PLX_OK;
  plx_fail(g, w, PLX_INTERRUPTED, g->rank);
  return PLX_INTERRUPTED; /* whatever ended the group: this rank's handler raised, and what it raised is told */
}

int plx_check_wait(struct plx_group *g, struct plx_wait *w, uint32_t late, uint64_t since_ns) {
  int code = plx_poisoned(g, w);
  if (code != PLX_OK) return code;
  uint64_t now = plx_now_ns();
  if (now >= w->deadline_ns) return plx_fail(g, w, PLX_DEADLINE, late);
  return now - since_ns < PLX_SLICE_NS ? PLX_OK : plx_ask_caller(g, w, since_ns);
}

uint64_t plx_slice_ns(const struct plx_wait *w, uint64_t since_ns) {
  uint64_t now = plx_now_ns();
  if (w->deadline_ns <= now) return 1;
  uint64_t left = w->deadline_ns - now, slice = (now - since_ns) / 4;
  if (slice < PLX_FIRST_SLICE_NS) slice = PLX_FIRST_SLICE_NS;
  if (slice > PLX_SLICE_NS) slice = PLX_SLICE_NS;
  return left < slice ? left : slice;
}
