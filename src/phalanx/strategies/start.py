"""Restart a plain `python train.py` that requests several devices, with one rank per device."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch.distributed as dist

import phalanx._comm.backend as backend
from phalanx._comm.backend import Job
from phalanx._comm.rendezvous.launchers import find_incomplete_environment, find_launch


@dataclass(frozen=True)
class ScriptCommand:
    """A `ScriptCommand` is the command with which `phalanx run` can restart this program."""

    words: tuple[str, ...]

    @staticmethod
    def of(orig_argv: Sequence[str], argv: Sequence[str], main: ModuleType | None) -> ScriptCommand | str:
        """Return the command, or the reason why the program cannot be restarted."""
        spec = getattr(main, "__spec__", None)
        if "pytest" in sys.modules and main is not None and "pytest" in (spec.name if spec else argv[0]):
            return "a test"
        if spec is not None and "-m" in orig_argv:
            name = spec.name.removesuffix(".__main__")
            return ScriptCommand(("-m", name, *argv[1:]))
        file = getattr(main, "__file__", None)
        if file is None or not os.path.exists(file):
            given = {"-c": "a program given with `python -c`", "-": "a program read from standard input"}
            return given.get(argv[0] if argv else "", "a notebook or an interactive session")
        return ScriptCommand((file, *argv[1:]))


def is_launched(environ: Mapping[str, str]) -> bool:
    """Return whether this process was started by a launcher or by multiprocessing, or has initialized a job."""
    return bool(
        dist.is_initialized()
        or "RANK" in environ
        or find_launch(environ) is not None
        or multiprocessing.parent_process() is not None
        or find_incomplete_environment(environ, is_spawned=False)
    )


def join_or_start(called: str, num_ranks: int, *, launch: bool, timeout: float) -> Job:
    """Join this process's job, and return its place there. Without a job, restart the program with `num_ranks` ranks.

    Raises:
        RuntimeError: the program cannot be restarted, for example in a notebook or a test.
    """
    if num_ranks > 1 and launch and not is_launched(os.environ):
        program = ScriptCommand.of(sys.orig_argv, sys.argv, sys.modules.get("__main__"))
        if isinstance(program, str):
            raise RuntimeError(
                f"{called}: {num_ranks} ranks were requested, but {program} cannot be restarted as "
                "several processes. Make the strategy in a function that phalanx.launch(nproc_per_node=...) calls; or "
                "write a script"
            )
        _start(program, num_ranks)
    return backend.init(timeout=timeout)


def _start(program: ScriptCommand, num_ranks: int) -> None:
    """Replace this process with `phalanx run`; never return."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    words = [sys.executable, *flags, "-m", "phalanx", "run", "--nproc-per-node", str(num_ranks), *program.words]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, words)


def require_as_many(called: str, wanted: int, job: Job) -> None:
    """Raise if the number of devices differs from the number of ranks on this host.

    Raises:
        ValueError: the numbers differ; the message has both.
    """
    there = local_world_size(job)
    if wanted == there:
        return
    if job.world_size == 1 and find_launch(os.environ) is None and "RANK" not in os.environ:
        raise ValueError(
            f"{called}: {wanted} devices were requested, but this process is already a job of one rank, perhaps "
            "because of an earlier strategy: a job has the same ranks from start to end. Make this strategy first, or "
            "run the parts as separate scripts"
        )
    raise ValueError(
        f"{called}: {wanted} devices were requested, but the launcher has started {there} ranks on this host: leave "
        f"`devices` out, or start {wanted}"
    )


def local_world_size(job: Job) -> int:
    """Return the number of the job's ranks on this host."""
    ranks, local = find_world(os.environ)
    return local if ranks == job.world_size else job.world_size


def find_world(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of ranks of this process's job, and how many are on this host; (1, 1) without a job."""
    launch = find_launch(environ)
    sizes = [environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    if sizes[0].isdecimal():
        return int(sizes[0]), int(sizes[1] if sizes[1].isdecimal() else sizes[0])
    if launch is not None:
        return launch.world_size, launch.local_size or launch.world_size
    return (dist.get_world_size(), dist.get_world_size()) if dist.is_initialized() else (1, 1)
