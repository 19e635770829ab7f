"""In a rank of `phalanx run`, make ours the default backend, and refuse unknown backend names."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from phalanx._comm.backend.torch_integration.patch import distributed_c10d, patch
from phalanx._comm.backend.torch_integration.rendezvous_handlers import patch_agent_rendezvous
from phalanx._comm.backend.torch_integration.stores import patch_file_store, patch_prefix_store


def patch_launched_rank() -> None:
    """In a rank of `phalanx run`, make ours the default backend, and `env://` use the agent's store.

    The zygote of `phalanx run`, which imports torch for all ranks, calls this before each rank's environment is set.
    """
    _extend_start()
    patch_agent_rendezvous()
    patch_file_store()
    patch_prefix_store()


@patch(
    "torch.distributed.distributed_c10d.init_process_group(backend)",
    "torch.distributed.device_mesh.init_process_group",
    loses="init_process_group without a backend does not select 'phalanx' under `phalanx run`; pass backend='phalanx'",
)
def _extend_start() -> None:
    c10d = distributed_c10d()
    original = c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        module = importlib.import_module("phalanx._comm.backend.start")
        if backend is not None:
            module.refuse_unknown_backend(backend)
            original(backend, *args, **kwargs)
            return
        module.init_process_group(original, backend, *args, **kwargs)

    # A device mesh creates the default group itself if there is none.
    for name in ("distributed", "distributed.distributed_c10d", "distributed.device_mesh"):
        vars(importlib.import_module(f"torch.{name}"))["init_process_group"] = init_process_group
