"""Find the scheduler that started this command. The innermost one has priority: its variables describe this process."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from phalanx._job.schedulers import hosts, kubernetes, mpi, slurm
from phalanx._job.schedulers.allocation import Allocation
from phalanx.errors import LaunchError


def find_allocation(environ: Mapping[str, str], *, nnodes: int = 0) -> Allocation | None:
    """Return the allocation of this command as one of several nodes; None if there is none.

    Schedulers in order of priority: `mpiexec` (which may run inside a job of Slurm, LSF or PBS), a step of Slurm, the
    pods of Kubernetes, and last LSF and PBS, which only list hosts. `nnodes` is --nnodes, or 0 without that option.

    Raises:
        LaunchError: the variables contradict each other, or are incomplete; the message names them.
    """
    found = mpi.find(environ) or slurm.find(environ)
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


def _own_full_name() -> str:
    """Return NAME.SERVICE.NAMESPACE.svc… in a pod with a headless service: Kubernetes writes it into /etc/hosts."""
    return socket.getfqdn()
