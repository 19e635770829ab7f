"""Make `torch.distributed._dist2`, which has a table of backends of its own, find ours."""

from __future__ import annotations

import importlib.util
import itertools
import types
from datetime import timedelta
from typing import Any

from phalanx.backend.torch_integration.patch import patch


def serve_dist2() -> None:
    """Let `torch.distributed._dist2.new_group("phalanx", ...)` make groups, where torch has it: up to 2.13."""
    if importlib.util.find_spec("torch.distributed._dist2") is not None:
        _serve_dist2()


@patch(
    "torch.distributed._dist2.register_backend(name, func)",
    loses="new_group('phalanx') of torch.distributed._dist2 does not work; use torch.distributed.new_group",
)
def _serve_dist2() -> None:
    dist2 = importlib.import_module("torch.distributed._dist2")
    numbers = itertools.count()

    def create(store: Any, rank: int, world_size: int, timeout: timedelta, device: Any, **kwargs: Any) -> Any:
        module = importlib.import_module("phalanx.backend")
        options = types.SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=world_size,
            timeout=timeout,
            group_id=f"dist2-{next(numbers)}",
            global_ranks_in_group=[],
        )
        return module.create_process_group(options, module.Options(**kwargs))

    dist2.register_backend("phalanx", create)
