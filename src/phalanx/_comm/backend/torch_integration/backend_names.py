"""Register the names "phalanx" and "mpi" with torch, and prepare the backend when a program asks for one of them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def offer_backend() -> None:
    """Register the names "phalanx" and "mpi" with torch. `import torch` calls this; it may be called again."""
    import torch.distributed as dist

    if not dist.is_available() or "phalanx" in dist.Backend.backend_list:
        return
    # A list: torch reads a plain string as the devices 'c', 'p' and 'u'. CUDA tensors go to an inner NCCL group.
    # `_enable_backend` later checks for a GPU: the check takes time, and may make the process unable to fork.
    devices = ["cpu", "cuda"] if dist.is_nccl_available() else ["cpu"]
    backend: Any = dist.Backend
    backend.register_backend("phalanx", create_group, extended_api=True, devices=devices)
    # While any plugin is listed, torch (2.13, `_new_process_group_helper`) does not give a group "cpu:gloo" the name of
    # Gloo. So ours is listed only once a program requests it; needed until torch compares names in one case.
    plugins = getattr(backend, "_plugins", {})
    plugin = plugins.pop("PHALANX", None)
    if plugin is not None:
        backend._plugins = _Plugins(plugins, lambda: _enable_backend(plugin))
    backend.PHALANX = _BackendName("phalanx", lambda: _enable_backend(plugin))
    if not dist.is_mpi_available():
        backend.MPI = _BackendName("mpi", lambda: _enable_mpi(plugin))
    steps = sys.modules.get("phalanx._comm.backend.torch_integration.training_steps")
    if steps is not None:  # a step recorder was started before torch was imported
        steps.start_observing()
    if os.environ.get("PHALANX_STORE"):
        launchers = importlib.import_module("phalanx._comm.rendezvous.launchers")
        if launchers.find_agents_store(os.environ):  # otherwise a rank has started this process
            importlib.import_module("phalanx._comm.backend.torch_integration.launched_rank").patch_launched_rank()


def create_group(options: Any, backend_options: Any) -> Any:
    """Create the process group for torch, as `create_process_group` does."""
    from phalanx._comm.backend import create_process_group
    from phalanx._comm.backend.torch_integration.hooks import patch_group_hooks
    from phalanx._comm.backend.torch_integration.stores import patch_prefix_store

    patch_prefix_store()
    patch_group_hooks()
    return create_process_group(options, backend_options)


class _Plugins(dict[str, Any]):
    """`_Plugins` is torch's table of backends; looking up "PHALANX" first adds our backend to the table.

    Libraries that create groups themselves read a backend's `creator_fn` here, without resolving its name in torch.
    """

    def __init__(self, known: dict[str, Any], first: Callable[[], None]) -> None:
        super().__init__(known)
        self._first = first

    def __contains__(self, name: object) -> bool:
        if name == "PHALANX":
            self._first()
        return super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the entry of this name, or `default`."""
        return super().get(name, default) if name in self else default


class _BackendName:
    """A `_BackendName`, an attribute of `dist.Backend`, is a backend's name; it calls `first` when torch resolves it.

    Every request for a backend (`init_process_group`, `new_group`, a pair "cpu:phalanx") constructs a `Backend` from
    its name. torch also reads `Backend.MPI` for comparisons, which are not requests.
    """

    def __init__(self, name: str, first: Callable[[], None]) -> None:
        self._name = name
        self._first = first

    def __get__(self, instance: object, owner: Any) -> str:
        resolves = getattr(owner.__new__, "__code__", None)
        if resolves is None or sys._getframe(1).f_code is resolves:
            self._first()
        return self._name


_enabled: list[bool] = []  # has an element once a program has requested our backend


def _enable_backend(plugin: Any) -> None:
    """List our plugin in torch again, and apply the patches that its users need; later calls do nothing."""
    if _enabled:
        return
    _enabled.append(True)
    import torch
    import torch.distributed as dist

    from phalanx._comm.backend.torch_integration.monitored_barrier import extend_monitored_barrier
    from phalanx._comm.backend.torch_integration.rendezvous_handlers import (
        patch_agent_rendezvous,
        patch_launcher_rendezvous,
    )

    backend: Any = dist.Backend
    if not torch.cuda.device_count():  # programs choose their tensors' device by this table
        backend.backend_capability["phalanx"] = ["cpu"]
    if plugin is not None:
        backend._plugins["PHALANX"] = plugin
    else:
        names = importlib.import_module("phalanx._base.torch_names")
        names.report_loss(
            "has no torch.distributed.Backend._plugins",
            'libraries do not recognize a group "cpu:gloo" as Gloo',
        )
    patch_agent_rendezvous()
    patch_launcher_rendezvous()
    extend_monitored_barrier()
    _authenticate_pickles()


def _authenticate_pickles() -> None:
    from phalanx._comm.backend.torch_integration import object_collectives, pickles_in_tensors

    object_collectives.authenticate_object_collectives()
    object_collectives.number_object_collectives()
    pickles_in_tensors.authenticate_pickles_in_tensors()


def _enable_mpi(plugin: Any) -> None:
    importlib.import_module("phalanx._comm.backend.torch_integration.mpi").patch_mpi()
    _enable_backend(plugin)
