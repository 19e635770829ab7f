"""Register our backend with `torch.distributed._dist2`, which has its own table of backends."""

from __future__ import annotations

import importlib
import itertools
import types
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx._comm.backend.torch_integration.patch import patch


@patch(
    "torch.distributed._dist2.register_backend(name, func)",
    loses="new_group('phalanx') of torch.distributed._dist2 does not work; use torch.distributed.new_group",
)
def patch_dist2() -> None:
    """Make `torch.distributed._dist2.new_group("phalanx", ...)` work; called when that module has been imported."""
    dist2 = importlib.import_module("torch.distributed._dist2")
    numbers = itertools.count()

    def create(store: Any, rank: int, world_size: int, timeout: timedelta, device: Any, **kwargs: Any) -> Any:
        name = dist.Backend("phalanx")  # from now on torch lists our plugin
        backend: Any = dist.Backend
        options = types.SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=world_size,
            timeout=timeout,
            group_id=f"dist2-{next(numbers)}",
            global_ranks_in_group=[],
        )
        module = importlib.import_module("phalanx._comm.transport.options")
        return backend._plugins[name.upper()].creator_fn(options, module.Options(**kwargs))

    dist2.register_backend("phalanx", create)
