"""Find out which process this is from what has started it: torchrun's variables, an `mpiexec`, a step of Slurm.

It is purely data, but for a look at the processes above this one: Slurm's variables are also in the shell that a user
types in, and in the body of a batch script, where a program is one process of its own.
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
    """A `LaunchedProcess` says which of how many processes this is. `local_size` is 0 if the launcher does not say it.

    `job` names this job among those of a user on one host; `first_host` is where rank 0 runs, and `port` one that is
    probably free there: both empty where the launcher does not say.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    job: str = ""
    first_host: str = ""
    port: int = 0


# Each MPI tells its processes these: (rank, size, local rank, local size).
_MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}

# Each of these says that this process is one of several, but not enough for a rendezvous.
_HALF_TOLD = (
    "LOCAL_RANK", "PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK",
    "PALS_RANKID", "ALPS_APP_PE", "JSM_NAMESPACE_RANK",
)  # fmt: skip
_SIZES = (
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE",
    "PALS_SIZE", "JSM_NAMESPACE_SIZE",
)  # fmt: skip

_NO_STEP = 0xFFFFFFF0  # larger numbers mean a batch script, an interactive shell and the like
_PORTS = range(20000, 30000)  # these are below those that systems give to outgoing connections
_STEPD = re.compile(r"slurmstepd: \[(\d+)\.(\w+)\]")


def find_launch(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Return what an `mpiexec` or Slurm says of this process, or None: nobody says that it is one of several.

    MPI goes first: an `mpiexec` inside Slurm starts its helpers as a step, whose variables its ranks inherit.
    """
    if _is_pmi_of_slurm(environment):
        return slurm_launch(environment)
    return mpi_launch(environment) or slurm_launch(environment)


def mpi_launch(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Return what an `mpiexec` says of this process (MPICH and Intel MPI speak alike), or None."""
    if _is_pmi_of_slurm(environment):
        return None
    for launcher, (rank, size, local_rank, local_size) in _MPI.items():
        if not (_is_number(environment, rank) and _is_number(environment, size)):  # unset, or emptied to that end
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
    """Return what a step of Slurm (`srun`) says of this process; None outside of a step, or alone in one."""
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
    """Return how many tasks of the step are on this host. Slurm writes '2(x3),1', and SLURM_NODEID is the index."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(match[1])] * int(match[2] or 1)
    try:
        return counts[int(environment["SLURM_NODEID"])]
    except (KeyError, ValueError, IndexError):
        return 1


def _is_step(job: str, step: str) -> bool:
    """Return whether this process runs in that step: other processes inherit the variables, too."""
    for title in _titles_above():
        if match := _STEPD.match(title):
            return match[1] == job and match[2] == step
    return step.isdecimal() and int(step) < _NO_STEP


def _titles_above() -> Iterator[str]:
    """Yield the titles of the processes above this one, from the nearest on."""
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
    """Return whether somebody typed this command into the shell of `srun --pty`, where only the first task goes on.

    A shell that is typed into gives each command a process group of its own, a script does not.
    """
    if "SLURM_PTY_PORT" not in environment:
        return False
    try:
        return os.getpgid(int(environment["SLURM_TASK_PID"])) != os.getpgid(0)
    except (KeyError, ValueError, OSError):
        return False


def _is_pmi_of_slurm(environment: Mapping[str, str]) -> bool:
    """Return whether it was Slurm, not an `mpiexec`, that set MPICH's variables (srun --mpi=pmi2)."""
    return (
        "PMI_RANK" in environment
        and "MPI_LOCALRANKID" not in environment
        and environment.get("PMI_JOBID", "").startswith(f"{environment.get('SLURM_JOB_ID')}.")
    )


def first_of(hosts: str) -> str:
    """Return the first name of a list in Slurm's form: 'n[03-05,9]' begins with n03."""
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^\[,]*)", hosts)
    return "".join(part or "" for part in match.groups()) if match else ""


# PHALANX_STORE begins with this if the job's store is a coordinator. The path of a file without a name follows, which
# holds {"address": …, "key": …}: the key is in no variable, which all that a rank starts would inherit.
COORDINATOR = "coordinator:"


def describe_rank(environment: Mapping[str, str]) -> str:
    """Return in a word which rank of which job the variables name; another launcher inside of a rank changes it."""
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    return "/".join(environment.get(name, "") for name in names)


def find_agents_store(environment: Mapping[str, str]) -> str:
    """Return the address of the store that `phalanx run` keeps for this rank; empty in every other process.

    What a rank starts inherits PHALANX_STORE: torchrun, or a program that is given a RANK by hand. Those ranks are of
    another job, and PHALANX_STORE_OF tells: it names the rank that was meant.
    """
    store = environment.get("PHALANX_STORE", "")
    return store if store and environment.get("PHALANX_STORE_OF") == describe_rank(environment) else ""


def find_incomplete_environment(environment: Mapping[str, str], *, is_spawned: bool) -> str:
    """Return what says that this process is one of several, where nothing says which, or where they meet; or nothing.

    `is_spawned`: this process was started by `multiprocessing`.
    """
    ranks = {name: environment[name] for name in _HALF_TOLD if environment.get(name, "") not in ("", "-1")}
    if ranks.get("LOCAL_RANK") == "0":
        del ranks["LOCAL_RANK"]
    if "SLURM_JOB_ID" in environment:  # Slurm says it all: what its plugins set for one task alone means nothing
        ranks = {name: value for name, value in ranks.items() if not name.startswith("PMI")}
    sizes = {name: environment[name] for name in _SIZES if environment.get(name, "") not in ("", "1")}
    if sizes or (ranks and not any(name in environment for name in _SIZES)):
        variables = ", ".join(f"{name}={value}" for name, value in {**ranks, **sizes}.items())
        return f"{variables} in the environment"
    if is_spawned:
        return "it was started by multiprocessing (mp.spawn)"
    return ""
