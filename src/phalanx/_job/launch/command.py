"""Run `phalanx run`, from its words to its exit code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from phalanx._base.control_groups import count_cores
from phalanx._base.processes import SUPPORTED, has_working_directory
from phalanx._job.agent import limits
from phalanx._job.agent.environment import find_disagreements, plan_environment
from phalanx._job.agent.placement import plan_placement
from phalanx._job.agent.plan import JobPlan, is_terminal, make_run_id
from phalanx._job.agent.settings import USAGE_EXIT_CODE, Settings
from phalanx._job.agent.target import find_problem
from phalanx._job.launch.command_line import parse
from phalanx._job.launch.devices import count_gpus, find_cpus, share_cpus
from phalanx._job.launch.run_job import run_job
from phalanx._job.output.standard import guarded, open_standard_descriptors
from phalanx._job.output.text import show
from phalanx._job.schedulers import SIGNS
from phalanx.errors import LaunchError


def main(words: Sequence[str], *, old_launcher: bool = False) -> int:
    """Run the job that `words` describe; returns the exit code, after printing problems on stderr.

    `old_launcher`: parse them as torch.distributed.launch does.
    """
    open_standard_descriptors()
    environ: Mapping[str, str] = os.environ
    try:
        settings = parse(words, os.environ, old_launcher=old_launcher)
        if settings is None:
            from phalanx._job.launch.manual import format_help  # here, because jobs have no use for it

            guarded(lambda: print(format_help()))
            return 0
        if settings.completion:
            from phalanx._job.launch.completion import make_completion  # here, because jobs have no use for it

            script = make_completion(settings.completion)
            guarded(lambda: print(script, end=""))
            return 0
        if any(name in os.environ for name in SIGNS):
            from phalanx._job.launch.adopt import adopt  # here, because most commands are started by hand

            settings, environ = adopt(settings, os.environ, lambda line: show(2, line))
    except LaunchError as error:
        show(2, str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return run_settings(settings, environ)


def run_settings(settings: Settings, environ: Mapping[str, str]) -> int:
    """Run the job that `settings` describe; returns the exit code, after printing problems on stderr."""
    try:
        plan = plan_job(settings, environ)
    except LaunchError as error:
        show(2, str(error))
        return error.exit_code
    except KeyboardInterrupt:  # in the first moments, before signals are caught: nothing was started
        return 128 + signal.SIGINT
    return run_plan(plan)


def run_plan(plan: JobPlan) -> int:
    """Run the planned job; returns the exit code, after printing problems on stderr."""
    try:
        if not SUPPORTED:
            show(
                2,
                f"phalanx run: {sys.platform} tells no process of its parent's death: processes may be left if this "
                "command is killed with SIGKILL, or if a rank starts daemons. On Linux none are.",
            )
        return run_job(plan)
    except LaunchError as error:
        show(2, str(error))
        return error.exit_code
    except KeyboardInterrupt:  # before signals are caught: nothing was started
        return 128 + signal.SIGINT


_NO_FOLDER = "the current folder has been removed, and PyTorch cannot be loaded in it. cd to one that is there."


def plan_job(settings: Settings, environ: Mapping[str, str], environment: Mapping[str, str] | None = None) -> JobPlan:
    """Inspect the host, and decide everything that can be decided before a process is started.

    `environ` is this command's environment. `environment`, which the ranks inherit, is by default built from --env.

    Raises:
        LaunchError: with all the problems that were found.
    """
    problems = []
    if environment is None:
        environment = plan_environment(environ, settings.env)
    found = find_cpus()
    cpus = share_cpus(found, *settings.share)
    cores = max(1, count_cores(len(found)) * len(cpus) // len(found))
    by_gpu = settings.nproc in ("auto", "gpu") or settings.ranks_per_gpu is not None
    gpus = count_gpus(environment) if by_gpu else 0
    num_ranks = 0
    try:
        num_ranks = decide_num_ranks(settings.nproc, cores, gpus, settings.ranks_per_gpu)
    except LaunchError as error:
        problems.append(str(error))
    else:
        alone = settings.standalone or settings.rendezvous is not None
        disagreements = find_disagreements(environ, num_ranks, standalone=alone)
        problems += [f"phalanx run: {problem}" for problem in disagreements]
        limit_problem = limits.find_problem(num_ranks)
        if limit_problem is not None:
            problems.append(f"phalanx run: --nproc-per-node {settings.nproc}: {limit_problem}")
    has_place = has_working_directory() or settings.target.kind == "program"
    target_problem = find_problem(settings.target, environment) if has_place else _NO_FOLDER
    if target_problem is not None:
        problems.append(f"phalanx run: {target_problem}")
    if SUPPORTED and not os.path.isdir("/proc/self/fd"):
        problems.append(
            "phalanx run: there is no /proc here, and only through it do the ranks find the job's store, which has no "
            "port and no name. Mount it (mount -t proc proc /proc), or start the ranks yourself with MASTER_ADDR and "
            "MASTER_PORT: they will not share memory."
        )
    if problems:
        raise LaunchError("\n".join(problems), exit_code=USAGE_EXIT_CODE)
    pin = settings.affinity and hasattr(os, "sched_setaffinity")
    placement = plan_placement(cpus, num_ranks, cores=cores, pin=pin)
    variables = {}
    if settings.report is not None:
        variables["PHALANX_REPORT"] = os.path.abspath(settings.report)
    if settings.ranks_per_gpu is not None:
        variables["PHALANX_RANKS_PER_GPU"] = str(settings.ranks_per_gpu)
    return JobPlan(
        settings,
        num_ranks,
        placement,
        is_terminal(),
        dict(environ),
        settings.run_id or make_run_id(),
        environment=environment,
        rank_variables=variables,
        run=make_run_id(),
    )


RANKS_PER_CORE = 64  # more is a slip of the finger: each rank is a process that wants memory and time


def decide_num_ranks(nproc: str, cpus: int, gpus: int, ranks_per_gpu: int | None = None) -> int:
    """Return how many ranks `nproc` means on a host with `cpus` usable cores and `gpus` GPUs.

    Raises:
        LaunchError: gpu without a GPU, more ranks than the GPUs may have, or implausibly many.
    """
    if ranks_per_gpu is not None:
        return _decide_ranks_on_gpus(nproc, gpus, ranks_per_gpu)
    if nproc == "gpu" and gpus == 0:
        raise LaunchError(
            "phalanx run: --nproc-per-node gpu: this host has no GPU that CUDA could use "
            "(the driver shows none, or CUDA_VISIBLE_DEVICES hides them). "
            f"Use --nproc-per-node cpu for {cpus} ranks, one per core; `nvidia-smi` shows what the driver sees.",
            exit_code=USAGE_EXIT_CODE,
        )
    if nproc in ("auto", "cpu", "gpu"):
        return gpus if nproc == "gpu" or (nproc == "auto" and gpus) else cpus
    count, limit = int(nproc), RANKS_PER_CORE * max(cpus, 1)
    if count > limit:
        raise LaunchError(
            f"phalanx run: --nproc-per-node {count}: more than {RANKS_PER_CORE} ranks for each of the {cpus} cores "
            f"that this command may use, {limit} in all. Give at most that; --nproc-per-node cpu starts {cpus}.",
            exit_code=USAGE_EXIT_CODE,
        )
    return count


def _decide_ranks_on_gpus(nproc: str, gpus: int, ranks_per_gpu: int) -> int:
    asked = f"phalanx run: --ranks-per-gpu {ranks_per_gpu}"
    most = gpus * ranks_per_gpu
    if gpus == 0:
        problem = (
            f"{asked}: this host has no GPU that CUDA could use (the driver shows none, or CUDA_VISIBLE_DEVICES hides "
            "them). Leave it out for ranks on the CPU; `nvidia-smi` shows what the driver sees."
        )
    elif nproc == "cpu":
        problem = f"{asked} and --nproc-per-node cpu: ranks are counted by GPUs or by cores. Give one of the two."
    elif nproc.isdecimal() and int(nproc) > most:
        have = "1 GPU has" if gpus == 1 else f"{gpus} GPUs have"
        problem = (
            f"{asked}: {have} room for {most} ranks, and --nproc-per-node asks for {nproc}. "
            f"Give --ranks-per-gpu {-(-int(nproc) // gpus)}."
        )
    else:
        return int(nproc) if nproc.isdecimal() else most
    raise LaunchError(problem, exit_code=USAGE_EXIT_CODE)
