"""An `mpiexec phalanx run train.py`: each MPI process is a node, also where several are on one host."""

from __future__ import annotations

import os
from collections.abc import Mapping

from phalanx.coordination.launchers import mpi_launch
from phalanx.launch.schedulers.allocation import Allocation, read_port
from phalanx.symmetric_memory.watch import start_ticks

_VARIABLES = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
}


def find(environ: Mapping[str, str]) -> Allocation | None:
    """What an `mpiexec` of several processes says; None without one."""
    launch = mpi_launch(environ)
    if launch is None or launch.world_size == 1:
        return None
    # Where the launcher has no name for the job, the process that has started all of this host stands for it.
    job = launch.job or f"mpiexec-{os.getppid()}-{start_ticks(os.getppid())}"
    return Allocation(
        launch.launcher,
        launch.rank,
        launch.world_size,
        job,
        _VARIABLES[launch.launcher],
        first_host=environ.get("MASTER_ADDR", ""),
        port=read_port(environ, "MASTER_PORT"),
        local_node=launch.local_rank,
        num_local_nodes=launch.local_size or launch.world_size,
    )
