"""Make a torch that was built without MPI accept the backend "mpi": our group, with MPI as its engine."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed import PrefixStore

from phalanx._comm.backend.rendezvous import mpi_rendezvous
from phalanx._comm.backend.torch_integration.backend_names import create_group
from phalanx._comm.backend.torch_integration.patch import distributed_c10d, patch
from phalanx._comm.transport.options import Options


@patch(
    "torch.distributed.distributed_c10d._new_process_group_helper(group_size, group_rank, global_ranks_in_group, "
    "backend, store, group_name, timeout)",
    "torch.distributed.distributed_c10d._MPI_AVAILABLE",
    loses="backend 'mpi' is not available, because this PyTorch was built without MPI",
)
def patch_mpi() -> None:
    """Make backend "mpi" work. Libraries choose by `is_mpi_available()`, so it is true only from the first group on.

    For this name torch calls `is_mpi_available()` and `ProcessGroupMPI.create(ranks)`. It passes neither the store nor
    the timeout to them, so a wrapper around `_new_process_group_helper` reads both.
    """
    c10d = distributed_c10d()
    helper = c10d._new_process_group_helper
    signature = inspect.signature(helper)

    @functools.wraps(helper)
    def new_process_group(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if "mpi" not in str(arguments["backend"]):
            return helper(*args, **kwargs)
        if str(arguments["backend"]) != "mpi":
            raise ValueError(
                f'backend {arguments["backend"]!r}: "mpi" cannot be combined with other backends in one group.\n'
                'Use "mpi" alone, and create another group for other devices.'
            )
        if not arguments["global_ranks_in_group"]:  # in torch, MPI determines the ranks
            arguments["store"], arguments["group_rank"], arguments["group_size"] = mpi_rendezvous(arguments["timeout"])
        offered = types.SimpleNamespace(create=lambda ranks: _create(arguments))
        vars(c10d).update(_MPI_AVAILABLE=True, ProcessGroupMPI=offered)
        return helper(**arguments)

    vars(c10d)["_new_process_group_helper"] = new_process_group


def _create(arguments: Mapping[str, Any]) -> Any:
    """Create the group for the arguments of torch's `_new_process_group_helper`."""
    options = types.SimpleNamespace(
        store=PrefixStore(f"{arguments['group_name']}/mpi", arguments["store"]),
        group_rank=arguments["group_rank"],
        group_size=arguments["group_size"],
        timeout=arguments["timeout"],
        group_id=arguments["group_name"],
        global_ranks_in_group=arguments["global_ranks_in_group"],
    )
    given = arguments.get("backend_options") or Options()
    return create_group(options, replace(given, engine="mpi") if isinstance(given, Options) else given)
