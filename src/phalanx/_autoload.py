"""`import torch` runs this when Phalanx is installed: it registers the backend's name, and loads nothing.

PyTorch calls `register` through the `torch.backends` entry point. Programs that never ask for the backend pay for one
dictionary entry.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make `init_process_group("phalanx")` known to torch; safe to call more than once."""
    from phalanx.backend.torch_integration.backend_names import offer_backend

    offer_backend(_begin_batch_watch)


def _begin_batch_watch(store: Any, rank: int, world_size: int) -> Any:
    """Return what looks at the batches of torch's DistributedDataParallel over one of our groups."""
    from phalanx.ddp.batch_watch import BatchWatch

    return BatchWatch(store, rank, world_size)
