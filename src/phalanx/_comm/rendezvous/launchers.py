"""Find this process's rank, or its store, from the variables of its launcher: an `mpiexec`, Slurm, or `phalanx run`.

The functions depend only on their arguments and on the parent processes. The parents matter because Slurm's variables
are also set in an interactive shell and in a batch script, where a program is a single process.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from phalanx._base.processes import read_stat


@dataclass(frozen=True)
class LaunchedProcess:
    """A `LaunchedProcess` is the place of a process in its job. `local_size` is 0 if the launcher does not set it.

    `job` identifies the job among a user's jobs on one host. `first_host` is the host of rank 0, and `port` a port that
    is probably free there; they are empty and 0 if the launcher does not determine them.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    job: str = ""
    first_host: str = ""
    port: int = 0


# Variables that each MPI sets in its processes: (rank, size, local rank, local size).
_MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}

# Variables that show that this process is one of several, but do not suffice for a rendezvous.
_INCOMPLETE = (
    "LOCAL_RANK", "PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK",
    "PALS_RANKID", "ALPS_APP_PE", "JSM_NAMESPACE_RANK",
)  # fmt: skip
_SIZES = (
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE",
    "PALS_SIZE", "JSM_NAMESPACE_SIZE",
)  # fmt: skip

_NO_STEP = 0xFFFFFFF0  # numbers from here on are not steps: a batch script, an interactive shell and so on
_PORTS = range(20000, 30000)  # below the usual range of ephemeral ports
_STEPD = re.compile(r"slurmstepd: \[(\d+)\.(\w+)\]")


def find_launch(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Return the place that an `mpiexec` or Slurm gave this process; None if neither did, or as Slurm's only task.

    MPI takes precedence: an `mpiexec` inside Slurm starts its helpers as a step, whose variables its ranks inherit.
    """
    if _is_pmi_of_slurm(environment):
        return slurm_launch(environment)
    return mpi_launch(environment) or slurm_launch(environment)


def mpi_launch(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Return the place that an `mpiexec` gave this process, or None (MPICH and Intel MPI set the same variables)."""
    if _is_pmi_of_slurm(environment):
        return None
    for launcher, (rank, size, local_rank, local_size) in _MPI.items():
        if not (_is_number(environment, rank) and _is_number(environment, size)):  # unset, or deliberately set to ""
            continue
        return LaunchedProcess(
            launcher,
            int(environment[rank]),
            int(environment[size]),
            int(environment[local_rank if _is_number(environment, local_rank) else rank]),
            int(environment[local_size]) if _is_number(environment, local_size) else 0,
            environment.get("PMIX_NAMESPACE", ""),
        )
    return None


def _is_number(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "").isdecimal()


def slurm_launch(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Return the place that a Slurm step (`srun`) gave this process.

    Return None outside a step, in a step with a single task, or for a command typed into the step's shell.
    """
    try:
        rank = int(environment["SLURM_PROCID"])
        size = int(environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"])
    except (KeyError, ValueError):
        return None
    job, step = (
        environment.get("SLURM_JOB_ID", ""),
        environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", "")),
    )
    if size == 1 or not _is_step(job, step) or _is_typed(environment):
        return None
    num_hosts = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
    local_rank = int(environment.get("SLURM_LOCALID", rank))
    local_size = size if num_hosts == 1 else _tasks_of(environment)
    name = f"slurm-{job}.{step}"
    reserved = environment.get("SLURM_STEP_RESV_PORTS", "").partition("-")[0].partition(",")[0]
    port = int(reserved) if reserved.isdecimal() else _PORTS[zlib.crc32(name.encode()) % len(_PORTS)]
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    return LaunchedProcess("Slurm", rank, size, local_rank, local_size, name, first_of(hosts), port)


def _tasks_of(environment: Mapping[str, str]) -> int:
    """Return the number of the step's tasks on this host, 1 if unknown.

    Slurm writes the numbers as '2(x3),1'; SLURM_NODEID is this host's index.
    """
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(match[1])] * int(match[2] or 1)
    try:
        return counts[int(environment["SLURM_NODEID"])]
    except (KeyError, ValueError, IndexError):
        return 1


def _is_step(job: str, step: str) -> bool:
    """Return whether this process runs in that step, because a process outside the step may inherit its variables."""
    for title in _titles_above():
        if match := _STEPD.match(title):
            return match[1] == job and match[2] == step
    return step.isdecimal() and int(step) < _NO_STEP


def _titles_above() -> Iterator[str]:
    """Yield the command lines of this process's ancestors, the parent first."""
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                yield f.read().rstrip(b"\0").decode(errors="replace")
        except OSError:
            return
        fields = read_stat(pid)
        pid = int(fields[1]) if fields else 0


def _is_typed(environment: Mapping[str, str]) -> bool:
    """Return whether a user typed this command into the shell of `srun --pty`, where only the first task runs.

    An interactive shell gives each command its own process group; a script does not.
    """
    if "SLURM_PTY_PORT" not in environment:
        return False
    try:
        return os.getpgid(int(environment["SLURM_TASK_PID"])) != os.getpgid(0)
    except (KeyError, ValueError, OSError):
        return False


def _is_pmi_of_slurm(environment: Mapping[str, str]) -> bool:
    """Return whether Slurm, not an `mpiexec`, set MPICH's variables (srun --mpi=pmi2)."""
    return (
        "PMI_RANK" in environment
        and "MPI_LOCALRANKID" not in environment
        and environment.get("PMI_JOBID", "").startswith(f"{environment.get('SLURM_JOB_ID')}.")
    )


def first_of(hosts: str) -> str:
    """Return the first name in a Slurm host list: 'n[03-05,9]' begins with n03."""
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^\[,]*)", hosts)
    return "".join(part or "" for part in match.groups()) if match else ""


# PHALANX_STORE begins with this if the job's store is a coordinator. The path of an anonymous file follows. The file,
# not the variable, holds the key: every program that a rank starts inherits its variables.
COORDINATOR = "coordinator:"


def describe_rank(environment: Mapping[str, str]) -> str:
    """Return a short text that identifies the rank and job in `environment`; under a nested launcher it differs."""
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    return "/".join(environment.get(name, "") for name in names)


def find_agents_store(environment: Mapping[str, str]) -> str:
    """Return the address of the store that `phalanx run` keeps for this rank; "" in every other process.

    A program that a rank starts inherits PHALANX_STORE, for example torchrun, or a program started with its own RANK.
    Its ranks belong to another job, so PHALANX_STORE_OF names the rank for which PHALANX_STORE was set.
    """
    store = environment.get("PHALANX_STORE", "")
    return store if store and environment.get("PHALANX_STORE_OF") == describe_rank(environment) else ""


def find_incomplete_environment(environment: Mapping[str, str], *, is_spawned: bool) -> str:
    """Return the evidence that this process, whose rank or store is unknown, is one of several; "" if there is none.

    `is_spawned`: `multiprocessing` started this process.
    """
    ranks = {name: environment[name] for name in _INCOMPLETE if environment.get(name, "") not in ("", "-1")}
    if ranks.get("LOCAL_RANK") == "0":
        del ranks["LOCAL_RANK"]
    if "SLURM_JOB_ID" in environment:  # Slurm's plugins may set PMI variables for a single task
        ranks = {name: value for name, value in ranks.items() if not name.startswith("PMI")}
    sizes = {name: environment[name] for name in _SIZES if environment.get(name, "") not in ("", "1")}
    if sizes or (ranks and not any(name in environment for name in _SIZES)):
        variables = ", ".join(f"{name}={value}" for name, value in {**ranks, **sizes}.items())
        return f"{variables} in the environment"
    if is_spawned:
        return "it was started by multiprocessing (mp.spawn)"
    return ""
