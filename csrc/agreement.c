/* This file publishes calls and compares them; the contract is in agreement.h. */
#include "agreement.h"

#include "recorder.h"

void plx_publish(struct plx_group *g, const struct plx_call *call) {
  /* A rank that goes on after a mismatch must not write over the call that slower ranks still compare. */
  if (atomic_load_explicit(&g->header->poison, memory_order_acquire) != 0) return;
  plx_rank_of(g, g->rank)->call[g->phase & 1] = *call;
}

int plx_calls_same(const struct plx_group *g, uint32_t rank, const struct plx_call *mine) {
  const struct plx_call *c = &plx_rank_of(g, rank)->call[g->phase & 1];
  return c->seq == mine->seq && c->count == mine->count && c->digest == mine->digest && c->kind == mine->kind &&
         c->dtype == mine->dtype && c->redop == mine->redop && c->root == mine->root;
}

int plx_agree(struct plx_group *g, const struct plx_call *mine) {
  for (uint32_t r = 0; r < g->world; r++)
    if (!plx_calls_same(g, r, mine)) return plx_poison(g, PLX_MISMATCH, g->rank);
  return PLX_OK;
}

int plx_sync_calls(struct plx_group *g, struct plx_wait *w, const struct plx_call *call) {
  int code = plx_sync(g, w);
  return code != PLX_OK ? code : plx_agree(g, call);
}

void plx_leave_open(struct plx_group *g, const struct plx_call *call, struct plx_record *record, uint64_t recorded) {
  g->open = (struct plx_open_phase){g->step, *call, record, recorded};
}

int plx_close_phase(struct plx_group *g, struct plx_wait *w) {
  if (g->open.step == 0) return PLX_OK;
  int code = plx_await(g, w, g->open.step);
  for (uint32_t r = 0; code == PLX_OK && r < g->world; r++)
    if (!plx_calls_same(g, r, &g->open.call)) code = plx_poison(g, PLX_MISMATCH, g->rank);
  g->open.step = 0;
  g->phase++;
  if (code != PLX_OK) plx_record_leave_late(g, g->open.record, g->open.recorded, code);
  return code;
}
