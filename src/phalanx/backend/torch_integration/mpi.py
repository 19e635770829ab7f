"""Make torch accept the backend "mpi" where it was built without MPI."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

from phalanx.backend.torch_integration.patch import distributed_c10d, patch


@patch(
    "torch.distributed.distributed_c10d._new_process_group_helper(backend, store, group_name, timeout)",
    "torch.distributed.distributed_c10d._MPI_AVAILABLE",
    loses="backend 'mpi' is not there, as this torch was built without MPI",
)
def serve_mpi() -> None:
    """Let backend "mpi" work through mpi4py; only now does `is_mpi_available()` say so, as libraries choose by it."""
    c10d = distributed_c10d()
    helper = c10d._new_process_group_helper
    signature = inspect.signature(helper)

    @functools.wraps(helper)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        if "mpi" not in str(signature.bind(*args, **kwargs).arguments["backend"]):
            return helper(*args, **kwargs)
        module = importlib.import_module("phalanx.backend.mpi.torch_hook")
        return module.new_process_group(helper, _give_torch_mpi, *args, **kwargs)

    vars(c10d)["_new_process_group_helper"] = new_process_group


def _give_torch_mpi(create: Callable[[Any], Any]) -> None:
    """Set the flag and the name by which torch makes a group of backend "mpi"."""
    vars(distributed_c10d()).update(_MPI_AVAILABLE=True, ProcessGroupMPI=types.SimpleNamespace(create=create))
