"""Start and stop recording this process's steps for a report, under any launcher or none."""

from __future__ import annotations

import atexit
import os
import platform
import shlex
import socket
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any
from zlib import crc32

import phalanx
from phalanx._base.processes import observe_uncaught
from phalanx._comm.backend.torch_integration.training_steps import observe_steps
from phalanx._comm.diagnostics import step_notes
from phalanx._comm.diagnostics.report_request import request_report
from phalanx._comm.diagnostics.step_recorder import StepRecorder
from phalanx._job.report.copy_speed import measure_copy_speed
from phalanx._job.report.job_record import RANKS, JobRecord
from phalanx._job.report.records import find_other_run, remove_old_records

_recorder: StepRecorder | None = None
_folder = ""  # the folder of the report for which this process records
_is_given = False  # the folder comes from the launcher, and overrides what the program passes
_before_end: list[Callable[[], None]] = []  # called before recording ends
_writers: list[Callable[[], None]] = []  # at most one: writes the report at exit, if Phalanx's launcher does not


def current() -> StepRecorder | None:
    """Return the recorder of this process's steps; None if there is none."""
    return _recorder


def current_folder() -> str:
    """Return the folder of the report for which this process records; empty if it records nothing."""
    return _folder if _recorder is not None else ""


def before_end(call: Callable[[], None]) -> None:
    """Register `call` to run before recording ends: at the end of the process, or when another report begins."""
    _before_end.append(call)


def begin_in_rank(folder: str) -> StepRecorder:
    """Record the steps of this process for the report in `folder`, which a launcher writes there.

    Recording begins once per process: a further call returns the same recorder.

    Raises:
        OSError: the recorder's file cannot be created.
    """
    global _is_given
    recorder = _recorder or _record(folder)
    _is_given = True
    return recorder


def begin(folder: str | os.PathLike[str]) -> StepRecorder:
    """Record this process's steps for a report in `folder`; every rank must call this before its first step.

    Under `phalanx run` the launcher writes the report at the end, even if ranks have died. Under another launcher, or
    none, rank 0 writes it when its process ends or begins another report. `phalanx run --report` overrides `folder`.

    Raises:
        ValueError: `folder` is empty.
        OSError: the recorder's file cannot be created, or another running job writes its report there.
    """
    name = os.fspath(folder)
    if not name:
        raise ValueError("phalanx.report.begin: needs the name of a folder, got ''")
    path = os.path.abspath(name)
    given = os.environ.pop("PHALANX_REPORT", "")  # still there in a program that `--no-python` has started
    if given:
        return begin_in_rank(given)
    agent = os.environ.get("PHALANX_AGENT", "")
    if _recorder is not None:
        if _is_given or path == _folder:
            return _recorder
        if agent and not _writers:
            warnings.warn(
                f"phalanx.report.begin: a job writes one report, and this job writes it to {_folder}: none is written "
                f"to {path}",
                RuntimeWarning,
                stacklevel=3,
            )
            return _recorder
        _end()
    if not agent:
        _prepare_folder(path)
    recorder = _record(path)
    if not (agent and request_report(agent, path)) and recorder.rank == 0:
        _write_at_end(path, recorder)
    return recorder


def _record(folder: str) -> StepRecorder:
    global _recorder, _folder
    environ = os.environ
    rank, world_size = _find_place(environ)
    attempt, run = _number(environ, "TORCHELASTIC_RESTART_COUNT"), _run_id(environ, world_size)
    ranks = os.path.join(folder, RANKS)
    os.makedirs(ranks, exist_ok=True)
    name = f"{attempt:03}_{rank:05}_{socket.gethostname()}_{os.getpid()}_{crc32(run.encode()):08x}.steps"
    facts = _facts(environ, rank, attempt) | {"world_size": world_size, "run": run}
    recorder = StepRecorder(os.path.join(ranks, name), facts)
    recorder.on_first_step = _add_torch_facts
    recorder.device_memory = _device_memory
    recorder.rank_now = _rank_now
    _recorder, _folder = recorder, folder
    _register_end_and_fork_hooks()
    observe_steps(recorder)
    step_notes.listen(recorder)
    return recorder


@cache
def _register_end_and_fork_hooks() -> None:
    os.register_at_fork(after_in_child=_forget)
    atexit.register(_end)


def _prepare_folder(folder: str) -> None:
    """Prepare the folder, on rank 0 only, because Phalanx's launcher has not prepared it."""
    if _find_place(os.environ)[0]:
        return
    other = find_other_run(folder)
    if other is not None:
        raise FileExistsError(
            f"phalanx.report.begin: another process, {other.name} (pid {other.pid}), is recording for a report in "
            f"{folder}. Choose another folder; or, if both are ranks of one job, call init_process_group before this, "
            "so that each process knows its rank."
        )
    if not _number(os.environ, "TORCHELASTIC_RESTART_COUNT"):  # else keep the records of earlier attempts
        remove_old_records(folder)


def _find_place(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return this process's rank and world size: from the environment, else from torch.distributed, else 0 and 1."""
    if environ.get("RANK", "").isdecimal():
        return _number(environ, "RANK"), _number(environ, "WORLD_SIZE") or 1
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _run_id(environ: Mapping[str, str], world_size: int) -> str:
    """Return the id of this run; empty if the launcher sets none and there are several ranks."""
    if own := environ.get("PHALANX_RUN", ""):
        return own
    given = environ.get("TORCHELASTIC_RUN_ID", "")
    if given not in ("", "none"):  # "none" is torchrun's word for no id
        return given
    return "" if world_size > 1 else uuid.uuid4().hex


def _write_at_end(folder: str, recorder: StepRecorder) -> None:
    """Write the report when this process ends, because Phalanx's launcher does not write it."""
    from phalanx._job.report.write import write_report

    begun = time.monotonic()
    name = os.path.basename(sys.argv[0]) or "python"
    job = JobRecord(
        name,
        shlex.join([name, *sys.argv[1:]]),
        begun,
        time.time(),
        int(recorder.facts["world_size"]),
        pid=os.getpid(),
        host=socket.gethostname(),
        run=str(recorder.facts["run"]),
    )
    job.write(folder)
    failed: list[str] = []
    observe_uncaught(lambda error: failed.append(f"rank 0: {type(error).__name__}: {error}"))

    def write() -> None:
        end = "ended"  # no hook reports the code of sys.exit()
        if failed:
            end = "stopped" if failed[0].startswith("rank 0: KeyboardInterrupt") else "failed"
        text = failed[0] if failed else ""
        try:
            speed = {socket.gethostname(): measure_copy_speed()}
            replace(job, ended=time.monotonic(), end=end, end_text=text, copy_bytes_per_s=speed).write(folder)
            write_report(folder)
        except Exception as error:  # a missing report must not fail the program, whose work is done
            why = str(error) or type(error).__name__
            print(f"phalanx: the report could not be written to {folder}: {why}", file=sys.stderr)

    _writers.append(write)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _facts(environ: Mapping[str, str], rank: int, attempt: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "pid": os.getpid(),
        "attempt": attempt,
        "local_rank": _number(environ, "LOCAL_RANK"),
        "node": _number(environ, "GROUP_RANK"),
        "host": socket.gethostname(),
        "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "python": platform.python_version(),
        "phalanx": phalanx.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": _memory_bytes(),
    }


def _add_torch_facts(recorder: StepRecorder) -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    facts: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        facts["backend"] = dist.get_backend()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        facts["device"] = torch.cuda.get_device_name()
    recorder.add_facts(**facts)


def _device_memory() -> float:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0.0
    return float(torch.cuda.memory_allocated())


def _rank_now() -> int:
    dist = sys.modules["torch"].distributed if "torch" in sys.modules else None
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return _recorder.rank if _recorder is not None else 0


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _forget() -> None:
    """Cancel recording, and the work at exit, in a forked child: the child is not a rank."""
    global _recorder, _is_given
    if _recorder is not None:
        step_notes.stop_listening()
        _recorder.forget()
        _recorder = None
    _is_given = False
    _before_end.clear()
    _writers.clear()


def _end() -> None:
    """End recording, and write the report if Phalanx's launcher does not."""
    global _recorder
    while _before_end:
        _before_end.pop()()
    try:
        if _recorder is not None:
            step_notes.stop_listening()
            _recorder.close(ended=True)
    finally:
        _recorder = None
        while _writers:
            _writers.pop()()
