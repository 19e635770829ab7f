"""Read the variables of LSF and PBS. They list the hosts, and the user starts the command on each of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx._job.schedulers.allocation import Allocation
from phalanx.errors import LaunchError


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
        LaunchError: `hostname` is none of `hosts`.
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
    """Return whether two names can belong to one host: one of them may lack its domain."""
    if "." in host and "." in hostname:
        return host == hostname
    return host.partition(".")[0] == hostname.partition(".")[0]
