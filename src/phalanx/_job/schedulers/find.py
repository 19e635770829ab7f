"""Find the scheduler that started this command. The innermost one has priority: its variables describe this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from phalanx._base.processes import read_start_ticks
from phalanx._comm.rendezvous.launchers import mpi_launch
from phalanx._job.schedulers import hosts, kubernetes, slurm
from phalanx._job.schedulers.allocation import Allocation, read_port
from phalanx.errors import LaunchError

_MPI_VARIABLES = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
}


def find_allocation(environ: Mapping[str, str], *, nnodes: int = 0) -> Allocation | None:
    """Return the allocation of this command as one of several nodes; None if there is none.

    Schedulers in order of priority: `mpiexec` (which may run inside a job of Slurm, LSF or PBS), a step of Slurm, the
    pods of Kubernetes, and last LSF and PBS, which only list hosts. `nnodes` is --nnodes, or 0 without that option.

    Raises:
        LaunchError: the variables contradict each other, or are incomplete; the message names them.
    """
    found = _find_mpi(environ) or slurm.find(environ)
    if found is None:
        found = kubernetes.find_kubeflow(environ)
    if found is None and environ.get("JOB_COMPLETION_INDEX"):
        found = kubernetes.find_indexed_job(environ, _own_full_name(), nnodes)
    if found is None:
        found = hosts.find_lsf(environ, socket.gethostname()) or hosts.find_pbs(environ, socket.gethostname())
    if found is None:
        return None
    if found.node >= found.num_nodes:
        values = ", ".join(f"{name}={environ[name]}" for name in found.variables if name in environ)
        raise LaunchError(
            f"phalanx run: {values} in the environment: {found.scheduler} says that this is number {found.node} of "
            f"{found.num_nodes}, and numbers are 0 to {found.num_nodes - 1}. Unset what an outer job has left.",
            exit_code=2,
        )
    return found if found.num_nodes > 1 else None


def _find_mpi(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of an `mpiexec` of several processes; None without one.

    Each MPI process is a node, even several on one host.
    """
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
        _MPI_VARIABLES[launch.launcher],
        first_host=address or ("localhost" if is_on_one_host else ""),
        port=port,
        needs_mpi_broadcast=not is_named and not is_on_one_host,
        local_node=launch.local_rank,
        num_local_nodes=launch.local_size or launch.world_size,
    )


def _own_full_name() -> str:
    """Return this host's full name: NAME.SERVICE.NAMESPACE.svc… in a pod with a headless service (from /etc/hosts)."""
    return socket.getfqdn()
