"""Find the scheduler that started this command; the innermost one wins, because its variables describe this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx._base.processes import read_start_ticks
from phalanx._comm.rendezvous.launchers import mpi_launch
from phalanx._job.schedulers import kubernetes, slurm
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
        found = find_lsf(environ, socket.gethostname()) or find_pbs(environ, socket.gethostname())
    if found is None:
        return None
    if found.node >= found.num_nodes:
        values = ", ".join(f"{name}={environ[name]}" for name in found.variables if name in environ)
        raise LaunchError(
            f"phalanx run: {values} in the environment: {found.scheduler} says that this is number {found.node} of "
            f"{found.num_nodes}, but numbers are 0 to {found.num_nodes - 1}. Unset the variables of an outer job.",
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
        # MPICH does not name the job. Two jobs at the same address and port cannot be distinguished in any case.
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


# LSF and PBS list the hosts, and the user starts the command on each of them.


def find_lsf(environ: Mapping[str, str], hostname: str) -> Allocation | None:
    """Return LSF's allocation on several hosts; `blaunch` or `jsrun` starts this command once on each.

    Raises:
        LaunchError: this host is not in LSF's list of hosts.
    """
    if not environ.get("LSB_JOBID"):
        return None
    index = environ.get("LSB_JOBINDEX", "0")
    job = f"lsf-{environ['LSB_JOBID']}" + (f".{index}" if index not in ("", "0") else "")
    if environ.get("JSM_NAMESPACE_RANK", "").isdecimal() and environ.get("JSM_NAMESPACE_SIZE", "").isdecimal():
        return _of_jsrun(environ, job)
    if environ.get("LSB_DJOB_HOSTFILE") and os.path.exists(environ["LSB_DJOB_HOSTFILE"]):
        variable, words = "LSB_DJOB_HOSTFILE", Path(environ["LSB_DJOB_HOSTFILE"]).read_text().split()
    elif environ.get("LSB_MCPU_HOSTS"):
        variable, words = "LSB_MCPU_HOSTS", environ["LSB_MCPU_HOSTS"].split()[::2]
    else:
        variable, words = "LSB_HOSTS", environ.get("LSB_HOSTS", "").split()
    hosts = _unique(words)
    return _of_list(
        "LSF", job, hosts, hostname, ("LSB_JOBID", variable), f'blaunch -z "{" ".join(hosts)}" phalanx run …'
    )


def _of_jsrun(environ: Mapping[str, str], job: str) -> Allocation | None:
    """Return the allocation of `jsrun`, which numbers its processes; None if it has only one.

    The first of LSF's hosts is the host of process 0.
    """
    rank, size = int(environ["JSM_NAMESPACE_RANK"]), int(environ["JSM_NAMESPACE_SIZE"])
    if size == 1:
        return None
    hosts = _compute_hosts(
        _unique(environ.get("LSB_HOSTS", "").split() or environ.get("LSB_MCPU_HOSTS", "").split()[::2])
    )
    local_size = environ.get("JSM_NAMESPACE_LOCAL_SIZE", "1")
    return Allocation(
        "LSF (jsrun)",
        rank,
        size,
        job,
        ("LSB_JOBID", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        first_host=hosts[0] if hosts else "",
        local_node=int(environ.get("JSM_NAMESPACE_LOCAL_RANK", "0")),
        num_local_nodes=int(local_size) if local_size.isdecimal() else 1,
    )


def find_pbs(environ: Mapping[str, str], hostname: str) -> Allocation | None:
    """Return PBS's or Torque's allocation on several hosts; `pbsdsh` starts this command once on each.

    Raises:
        LaunchError: this host cannot read the list of hosts, or is not in it.
    """
    if not environ.get("PBS_JOBID"):
        return None
    path = environ.get("PBS_NODEFILE", "")
    try:
        words = Path(path).read_text().split() if path else []
    except OSError as error:
        raise LaunchError(
            f"phalanx run: PBS job {environ['PBS_JOBID']}: PBS_NODEFILE={path}, the list of its hosts, cannot be read "
            f"here: {error.strerror}. Before pbsdsh, copy it to a folder that all hosts see (cp $PBS_NODEFILE "
            "~/hosts.$PBS_JOBID), and set PBS_NODEFILE to that; or name the rendezvous: phalanx run --nnodes N "
            "--rdzv-endpoint HOST:PORT",
            exit_code=2,
        ) from None
    return _of_list(
        "PBS",
        f"pbs-{environ['PBS_JOBID']}",
        _unique(words),
        hostname,
        ("PBS_JOBID", "PBS_NODEFILE"),
        "pbsdsh -- bash -lc 'cd $PBS_O_WORKDIR && phalanx run …', or mpiexec",
    )


def _of_list(
    scheduler: str, job: str, hosts: Sequence[str], hostname: str, variables: tuple[str, ...], hint: str
) -> Allocation | None:
    """Return the allocation of one node on each of `hosts`, of which `hostname` is one; None if there is only one host.

    Raises:
        LaunchError: `hostname` is not among `hosts`.
    """
    if len(hosts) < 2:
        return None
    here = [i for i, host in enumerate(hosts) if _is_same(host, hostname)]
    if not here:
        raise LaunchError(
            f"phalanx run: {scheduler} job {job} runs on {', '.join(hosts)} ({variables[-1]}), and this host is "
            f"{hostname}. For a job on this host alone: phalanx run --standalone.",
            exit_code=2,
        )
    return Allocation(scheduler, here[0], len(hosts), job, variables, first_host=hosts[0], hint=hint)


def _unique(words: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(words))


def _compute_hosts(hosts: list[str]) -> list[str]:
    """Return the hosts without the launch host of jsrun, which LSF lists first."""
    return [host for host in hosts if not host.startswith(("batch", "login"))] or hosts


def _is_same(host: str, hostname: str) -> bool:
    """Return whether two names can belong to one host; either name may lack its domain."""
    if "." in host and "." in hostname:
        return host == hostname
    return host.partition(".")[0] == hostname.partition(".")[0]
