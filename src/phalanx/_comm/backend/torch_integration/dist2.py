"""Make `torch.distributed._dist2`, which has a table of backends of its own, find ours."""

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
    """Let `torch.distributed._dist2.new_group("phalanx", ...)` make groups; called once that module is imported."""
    dist2 = importlib.import_module("torch.distributed._dist2")
    numbers = itertools.count()

    def create(store: Any, rank: int, world_size: int, timeout: timedelta, device: Any, **kwargs: Any) -> Any:
        name = dist.Backend("phalanx")  # from here on torch lists our plugin
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
