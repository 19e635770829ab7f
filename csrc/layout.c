/* This file computes what lies where in the shared memory; the picture is in layout.h. */
#include "layout.h"

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

static size_t rank_stride(size_t stage_bytes) {
  return round_up(sizeof(struct plx_rank), PLX_PAGE) + 3 * round_up(stage_bytes, PLX_PAGE);
}

static size_t channel_stride(size_t channel_bytes) { return round_up(sizeof(struct plx_channel) + channel_bytes, PLX_PAGE); }

size_t plx_group_bytes(uint32_t world, size_t stage_bytes, size_t channel_bytes) {
  if (world == 0 || world > PLX_MAX_WORLD || stage_bytes < PLX_PAGE || channel_bytes < PLX_PAGE ||
      (channel_bytes & (channel_bytes - 1)) != 0)
    return 0;
  return PLX_PAGE + world * rank_stride(stage_bytes) + (size_t)world * world * channel_stride(channel_bytes);
}

int plx_group_format(void *base, uint32_t world, size_t stage_bytes, size_t channel_bytes, int oversubscribed) {
  size_t total = plx_group_bytes(world, stage_bytes, channel_bytes);
  if (total == 0) return PLX_INVALID;
  struct plx_header *h = base;
  h->version = PLX_VERSION;
  h->world = world;
  h->total_bytes = total;
  h->rank_offset = PLX_PAGE;
  h->rank_stride = rank_stride(stage_bytes);
  h->stage_bytes = round_up(stage_bytes, PLX_PAGE);
  h->channel_offset = PLX_PAGE + world * h->rank_stride;
  h->channel_stride = channel_stride(channel_bytes);
  h->channel_bytes = channel_bytes;
  h->oversubscribed = oversubscribed != 0;
  h->magic = PLX_MAGIC;
  return PLX_OK;
}

int plx_group_check(const void *base, size_t bytes) {
  const struct plx_header *h = base;
  if (bytes < PLX_PAGE || h->magic != PLX_MAGIC || h->version != PLX_VERSION || h->total_bytes > bytes) return PLX_INVALID;
  /* Everything else follows from three numbers, so that a rank that wrote wildly leads no reader from outside astray. */
  if (plx_group_bytes(h->world, h->stage_bytes, h->channel_bytes) != h->total_bytes || h->rank_offset != PLX_PAGE ||
      h->rank_stride != rank_stride(h->stage_bytes) || h->channel_offset != PLX_PAGE + h->world * h->rank_stride ||
      h->channel_stride != channel_stride(h->channel_bytes))
    return PLX_INVALID;
  return PLX_OK;
}
