"""The world of a strategy is all ranks of the job; of an elastic job, those that it has now, and may get."""

from __future__ import annotations

import torch.distributed as dist

from phalanx._comm.backend import rendezvous


def world() -> dist.ProcessGroup | None:
    """Return all ranks of the job, or None if this is one alone; in an elastic job, those that it has now."""
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


def has_or_may_get_others() -> bool:
    """Return whether there are several ranks, or this is one of a job on several hosts, where others may come."""
    return world() is not None or (dist.is_initialized() and rendezvous.agents_key() is not None)
