"""The sizes in a group's control memory for each rank, and for each pair of ranks."""

from __future__ import annotations

# Two stages of this size per rank, chosen so that a chunk in transit fits in a second-level cache.
STAGE_BYTES = 128 * 1024
# Between hosts each sync of a rank's background thread waits for a core that backward uses, and no link is faster than
# the gain of a cache: fewer syncs, of larger chunks.
STAGE_BYTES_BETWEEN_HOSTS = 1024 * 1024


def channel_bytes(world_size: int) -> int:
    """Return the bytes of the ring between two ranks; larger groups, with world_size² rings, have smaller ones."""
    return 256 * 1024 if world_size <= 8 else 64 * 1024 if world_size <= 32 else 16 * 1024
