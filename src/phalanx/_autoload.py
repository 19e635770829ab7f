"""What `import torch` runs when Phalanx is installed: the backend's name is registered, nothing is loaded.

PyTorch calls `register` through the `torch.backends` entry point. Programs that never ask for the backend pay for one
dictionary entry.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any


def register() -> None:
    """Make `init_process_group("phalanx")` known to torch; safe to call more than once."""
    import torch.distributed as dist

    if not dist.is_available() or "phalanx" in dist.Backend.backend_list:
        return
    # A list: torch reads a plain string as the devices 'c', 'p' and 'u'. CUDA tensors go to an NCCL group inside.
    devices = ["cpu", "cuda"] if dist.is_nccl_available() else ["cpu"]
    dist.Backend.register_backend("phalanx", _create, extended_api=True, devices=devices)
    _extend_start()
    _extend_rendezvous()
    _extend_monitored_barrier()
    _offer_mpi()


def _create(options: Any, backend_options: Any) -> Any:
    from phalanx.backend import create_process_group

    return create_process_group(options, backend_options)


def _extend_start() -> None:
    """Under `phalanx run`, let a start that names no backend mean ours; any other backend sees torch's own."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    original = c10d.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if backend is not None and "phalanx" not in str(backend).lower():
            original(backend, *args, **kwargs)
            return
        home = importlib.import_module("phalanx.backend.start")
        home.init_process_group(original, backend, *args, **kwargs)

    # A device mesh starts the group itself where there is none.
    for name in ("distributed_c10d", "device_mesh"):
        vars(importlib.import_module(f"torch.distributed.{name}"))["init_process_group"] = init_process_group
    vars(importlib.import_module("torch.distributed"))["init_process_group"] = init_process_group


def _extend_rendezvous() -> None:
    """Let `env://` also work where only our launcher or an MPI's says who we are; torch's handler does the rest.

    Where that does not reach the others, by `env://` or `tcp://`, its error says who waited where.
    """
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the package shows a function of that name

    def extend(scheme: str, name: str) -> None:
        original = rendezvous._rendezvous_handlers[scheme]

        def handler(url: str, timeout: Any = rendezvous.default_pg_timeout, **kwargs: Any) -> Any:
            home = importlib.import_module("phalanx.backend.rendezvous")
            return getattr(home, name)(original, url, timeout, **kwargs)

        rendezvous._rendezvous_handlers[scheme] = handler

    extend("env", "env_rendezvous")
    extend("tcp", "address_rendezvous")


def _extend_monitored_barrier() -> None:
    """Let `dist.monitored_barrier` take our groups: torch's refuses them by name. All others see torch's own."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    original = c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        if "phalanx.backend.process_group" not in sys.modules:  # then there is no group of ours
            original(group, timeout, wait_all_ranks)
            return
        home = importlib.import_module("phalanx.backend.monitored_barrier")
        home.monitored_barrier(original, group, timeout, wait_all_ranks)

    for module in (c10d, importlib.import_module("torch.distributed")):
        vars(module)["monitored_barrier"] = monitored_barrier


def _offer_mpi() -> None:
    """Let backend "mpi" work, through mpi4py, where torch was built without MPI. Nothing is looked for until asked."""
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    if c10d.is_mpi_available():
        return
    helper = c10d._new_process_group_helper

    def is_mpi_available() -> bool:
        """Whether backend "mpi" can be asked for: mpi4py is installed."""
        return all(importlib.util.find_spec(name) is not None for name in ("mpi4py", "phalanx._core"))

    @functools.wraps(helper)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        if "mpi" not in str(args[3]):
            return helper(*args, **kwargs)
        home = importlib.import_module("phalanx.backend.mpi.torch_hook")
        return home.new_process_group(helper, *args, **kwargs)

    vars(c10d)["_new_process_group_helper"] = new_process_group
    for module in (c10d, importlib.import_module("torch.distributed")):
        vars(module)["is_mpi_available"] = is_mpi_available
