"""Plan a job on this host: inspect the host, and make all decisions before a process is started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from phalanx._base.control_groups import count_cores
from phalanx._base.processes import SUPPORTED, has_working_directory
from phalanx._job.agent import limits
from phalanx._job.agent.environment import find_disagreements, plan_environment
from phalanx._job.agent.plan import JobPlan, make_run_id, plan_pinning, read_terminal_columns
from phalanx._job.agent.settings import Settings, refuse
from phalanx._job.agent.target import find_problem
from phalanx._job.launch.devices import count_gpus, find_cpus, share_cpus

_NO_FOLDER = "the current folder was removed, and PyTorch cannot be loaded in it. cd to an existing folder."
_NO_PROC = (
    "there is no /proc. The ranks need it to open the job's store, which has no port and no name. Mount it "
    "(mount -t proc proc /proc), or start the ranks yourself with MASTER_ADDR and MASTER_PORT; then they do not share "
    "memory."
)
_NO_GPU = "this host has no GPU for CUDA (the driver finds none, or CUDA_VISIBLE_DEVICES hides them). "
_RANKS_PER_CORE = 64  # more is probably a typo: each rank is a process that needs memory and time


def plan_job(
    settings: Settings,
    command_environment: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
    *,
    problems: Sequence[str] = (),
) -> JobPlan:
    """Return the plan of the job that `settings` describe.

    Arguments:
        command_environment: the environment of this command.
        environment: the environment that the ranks inherit; by default, this command's environment with --env.
        problems: the problems of the command line, which are reported together with this host's.

    Raises:
        LaunchError: lists all problems.
    """
    problems, is_valid = list(problems), not problems
    if environment is None:
        environment = plan_environment(command_environment, settings.env)
    num_ranks, cpus, cores = 0, find_cpus(), 0
    if is_valid:  # otherwise the number of ranks may be wrong
        cpus, all_cpus = share_cpus(cpus, *settings.share), len(cpus)
        cores = max(1, count_cores(all_cpus) * len(cpus) // all_cpus)
        num_ranks = decide_num_ranks(settings, cores, environment, problems)
    if num_ranks:
        is_separate = settings.standalone or settings.rendezvous is not None
        problems += find_disagreements(command_environment, num_ranks, standalone=is_separate)
        if (problem := limits.find_problem(num_ranks)) is not None:
            problems.append(f"--nproc-per-node {settings.nproc_per_node}: {problem}")
    if settings.target.name:
        has_place = has_working_directory() or settings.target.kind == "program"
        problem = find_problem(settings.target, environment) if has_place else _NO_FOLDER
        problems += [] if problem is None else [problem]
    if SUPPORTED and not os.path.isdir("/proc/self/fd"):
        problems.append(_NO_PROC)
    refuse(problems)
    variables = {}
    if settings.report is not None:
        variables["PHALANX_REPORT"] = os.path.abspath(settings.report)
    if settings.ranks_per_gpu is not None:
        variables["PHALANX_RANKS_PER_GPU"] = str(settings.ranks_per_gpu)
    # A program is not pinned: unlike a script's children, its child processes could not leave its cores.
    pin = settings.affinity and hasattr(os, "sched_setaffinity") and settings.target.kind != "program"
    return JobPlan(
        settings,
        num_ranks,
        plan_pinning(cpus, num_ranks, cores=cores, pin=pin),
        columns=read_terminal_columns(),
        command_environment=dict(command_environment),
        environment=environment,
        run_id=settings.run_id or make_run_id(),
        run=make_run_id(),
        launcher_variables=variables,
        master_addr=settings.master_addr,
        master_port=settings.master_port,
    )


def decide_num_ranks(settings: Settings, cores: int, environment: Mapping[str, str], problems: list[str]) -> int:
    """Return how many ranks this host starts on `cores` cores and on its GPUs; append problems to `problems`."""
    by_gpu = settings.nproc_per_node in ("auto", "gpu") or settings.ranks_per_gpu is not None
    gpus = count_gpus(environment) if by_gpu else 0
    if settings.ranks_per_gpu is not None:
        return count_ranks_on_gpus(settings.nproc_per_node, gpus, settings.ranks_per_gpu, problems)
    return count_ranks(settings.nproc_per_node, cores, gpus, problems)


def count_ranks(nproc_per_node: str, cores: int, gpus: int, problems: list[str]) -> int:
    """Return the number of ranks for `nproc_per_node` on a host with `cores` usable cores and `gpus` GPUs.

    Append to `problems` if there is no GPU, or if the number is implausibly large.
    """
    if nproc_per_node == "gpu" and gpus == 0:
        problems.append(
            f"--nproc-per-node gpu: {_NO_GPU}"
            f"Use --nproc-per-node cpu for {cores} ranks, one per core; `nvidia-smi` shows the driver's GPUs."
        )
        return 0
    if nproc_per_node in ("auto", "cpu", "gpu"):
        return gpus if nproc_per_node == "gpu" or (nproc_per_node == "auto" and gpus) else cores
    count, limit = int(nproc_per_node), _RANKS_PER_CORE * max(cores, 1)
    if count > limit:
        problems.append(
            f"--nproc-per-node {count}: more than {_RANKS_PER_CORE} ranks for each of the {cores} cores that this "
            f"command may use, {limit} in all. Give at most that; --nproc-per-node cpu starts {cores}."
        )
        return 0
    return count


def count_ranks_on_gpus(nproc_per_node: str, gpus: int, ranks_per_gpu: int, problems: list[str]) -> int:
    """Return the number of ranks on a host with `gpus` GPUs; append to `problems` if they do not fit on the GPUs."""
    option, most = f"--ranks-per-gpu {ranks_per_gpu}", gpus * ranks_per_gpu
    if gpus == 0:
        problems.append(f"{option}: {_NO_GPU}Leave it out for ranks on the CPU; `nvidia-smi` shows the driver's GPUs.")
    elif nproc_per_node == "cpu":
        problems.append(f"{option} and --nproc-per-node cpu: ranks are counted by GPUs or by cores. Give only one.")
    elif nproc_per_node.isdecimal() and int(nproc_per_node) > most:
        have = "1 GPU has" if gpus == 1 else f"{gpus} GPUs have"
        problems.append(
            f"{option}: {have} room for {most} ranks, but --nproc-per-node is {nproc_per_node}. "
            f"Give --ranks-per-gpu {-(-int(nproc_per_node) // gpus)}."
        )
    else:
        return int(nproc_per_node) if nproc_per_node.isdecimal() else most
    return 0
