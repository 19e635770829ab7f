"""Find the job's ranks: in an elastic job, the current ones, and whether others may join."""

from __future__ import annotations

import torch.distributed as dist

from phalanx._comm.backend import rendezvous


def world() -> dist.ProcessGroup | None:
    """Return the group of all ranks of the job, or None for a single rank; in an elastic job, of the current ranks."""
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


def may_have_others() -> bool:
    """Return whether there are several ranks, or others may join from further hosts."""
    return world() is not None or (dist.is_initialized() and rendezvous.agents_key() is not None)
