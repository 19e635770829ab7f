"""Replace torch's rendezvous handlers for `env://`, `tcp://` and `file://` with ours, which may call torch's."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from typing import Any

from phalanx._comm.backend.torch_integration.patch import distributed_c10d, patch

_HANDLERS = (
    "torch.distributed.rendezvous._rendezvous_handlers",
    "torch.distributed.rendezvous.default_pg_timeout",
)


@patch(*_HANDLERS, loses="env:// does not find the store of `phalanx run`; use phalanx.init, or pass store=")
def patch_agent_rendezvous() -> None:
    """Make `env://` use the store of the agent of `phalanx run`."""
    _extend_scheme("env", "rendezvous.launched_rendezvous")


@patch(
    *_HANDLERS,
    "torch.distributed.distributed_c10d.init_process_group(backend)",
    loses="file:// may wait forever for a file that no store wrote, and env:// and tcp:// do not find the ranks of "
    "mpiexec and Slurm; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
)
def patch_launcher_rendezvous() -> None:
    """Make `env://` and `tcp://` work under mpiexec and Slurm, with better errors; make `file://` refuse foreign files.

    This applies only to our backend, under either of its names.
    """
    _extend_scheme("env", "rendezvous.env_rendezvous", ours_only=True)
    _extend_scheme("tcp", "rendezvous.address_rendezvous", ours_only=True)
    _extend_scheme("file", "init_file.file_rendezvous", ours_only=True)


def _extend_scheme(scheme: str, name: str, *, ours_only: bool = False) -> None:
    """Make `phalanx._comm.backend.<name>` handle the scheme; its first argument is the previous handler."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the package exports a function of that name
    original = rendezvous._rendezvous_handlers[scheme]

    def handler(url: str, timeout: Any = rendezvous.default_pg_timeout, **kwargs: Any) -> Any:
        if ours_only and not any(name in _calling_backend() for name in ("phalanx", "mpi")):
            return original(url, timeout=timeout, **kwargs)
        room, _, function = name.partition(".")
        module = importlib.import_module(f"phalanx._comm.backend.{room}")
        return getattr(module, function)(original, url, timeout, **kwargs)

    rendezvous._rendezvous_handlers[scheme] = handler


def _calling_backend() -> str:
    """Return the `backend` of the running `init_process_group`, which torch does not pass to handlers; "" in RPC."""
    start = inspect.unwrap(distributed_c10d().init_process_group).__code__
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not start:
        frame = frame.f_back
    return str(frame.f_locals.get("backend", "")).lower() if frame is not None else ""
