"""How a rank that run_ranks has given no group joins one."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def join_by_file(rank: int, world_size: int, path: object, timeout_s: float = 20.0) -> None:
    """Join a default group of Phalanx whose ranks meet in a file."""
    store = dist.FileStore(str(path), world_size)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=world_size, timeout=timeout)
