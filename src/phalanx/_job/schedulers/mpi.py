"""Read the variables of `mpiexec phalanx run train.py`: each MPI process is a node, even several on one host."""

from __future__ import annotations

import os
from collections.abc import Mapping

from phalanx._base.processes import read_start_ticks
from phalanx._comm.rendezvous.launchers import mpi_launch
from phalanx._job.schedulers.allocation import Allocation, read_port

_VARIABLES = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
}


def find(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of an `mpiexec` of several processes; None without one."""
    launch = mpi_launch(environ)
    if launch is None or launch.world_size == 1:
        return None
    address, port = environ.get("MASTER_ADDR", ""), read_port(environ, "MASTER_PORT")
    is_on_one_host = launch.local_size in (0, launch.world_size)
    if launch.job:
        job, is_named = launch.job, bool(address)
    elif is_on_one_host:
        # The process that has started all of this host's processes identifies the job.
        job, is_named = f"mpiexec-{os.getppid()}-{read_start_ticks(os.getppid())}", True
    else:
        # MPICH does not name the job. Two jobs at the same address and port are indistinguishable anyway.
        job, is_named = f"mpiexec-{address}:{port}", bool(address and port)
    return Allocation(
        launch.launcher,
        launch.rank,
        launch.world_size,
        job,
        _VARIABLES[launch.launcher],
        first_host=address,
        port=port,
        asks_mpi=not is_named and not is_on_one_host,
        local_node=launch.local_rank,
        num_local_nodes=launch.local_size or launch.world_size,
    )
