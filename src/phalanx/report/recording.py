"""A process that records its steps for a report: when that begins, what is known of it, when it ends."""

from __future__ import annotations

import atexit
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import phalanx
from phalanx.backend.torch_patches import observe_steps
from phalanx.diagnostics.report_request import ask_for_report
from phalanx.diagnostics.step_recorder import StepRecorder
from phalanx.report.copy_speed import measure_copy_speed
from phalanx.report.job_record import RANKS, JobRecord

_recorder: StepRecorder | None = None


def current() -> StepRecorder | None:
    """What records the steps of this process, if anything does."""
    return _recorder


def begin_in_rank(folder: str) -> StepRecorder:
    """Record the steps of this process, which a launcher has started, for the report in `folder`.

    Once a process: whoever asks again gets the same.

    Raises:
        OSError: its file can't be made.
    """
    global _recorder
    if _recorder is None:
        environ = os.environ
        rank, attempt = _number(environ, "RANK"), _number(environ, "TORCHELASTIC_RESTART_COUNT")
        ranks = os.path.join(folder, RANKS)
        os.makedirs(ranks, exist_ok=True)
        path = os.path.join(ranks, f"{attempt:03}_{rank:05}_{socket.gethostname()}_{os.getpid()}.steps")
        _recorder = StepRecorder(path, _facts(environ, rank, attempt))
        _recorder.on_first_step = lambda recorder: recorder.tell(**_torch_facts())
        _recorder.device_memory = _device_memory
        _recorder.rank_now = _rank_now
        os.register_at_fork(after_in_child=_forget)
        atexit.register(_end)
        observe_steps(_recorder)
    return _recorder


def begin(folder: str | os.PathLike[str]) -> StepRecorder:
    """Record this process's steps for a report in `folder`; every rank calls it, before its first step.

    Under `phalanx run` the launcher writes the report at the end, also when ranks have died. Under another launcher, or
    none, rank 0 does when it ends. Under `phalanx run --report` that folder is the one.

    Raises:
        OSError: its file can't be made.
    """
    path = os.path.abspath(os.fspath(folder))
    if _recorder is None:
        recorder = begin_in_rank(path)
        agent = os.environ.get("PHALANX_AGENT", "")
        if not (agent and ask_for_report(agent, path)) and recorder.rank == 0:
            _write_at_end(path, _number(os.environ, "WORLD_SIZE") or 1)
    assert _recorder is not None
    return _recorder


def _write_at_end(folder: str, world_size: int) -> None:
    """This process is the job's own launcher."""
    from phalanx.report.write import write_report

    begun = time.monotonic()
    name = os.path.basename(sys.argv[0]) or "python"
    job = JobRecord(
        name,
        shlex.join([name, *sys.argv[1:]]),
        begun,
        time.time(),
        world_size,
        pid=os.getpid(),
        host=socket.gethostname(),
    )
    job.write(folder)
    failed: list[str] = []
    hook = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed.append(f"rank 0: {kind.__name__}: {error}")
        hook(kind, error, trace)

    def write() -> None:
        _end()
        end = "ended"  # with what, no hook is told of sys.exit()
        if failed:
            end = "stopped" if "KeyboardInterrupt" in failed[0] else "failed"
        speed = {socket.gethostname(): measure_copy_speed()}
        text = failed[0] if failed else ""
        replace(job, ended=time.monotonic(), end=end, end_text=text, copy_bytes_per_s=speed).write(folder)
        write_report(folder)

    sys.excepthook = note
    atexit.register(_in_this_process(write))


def _in_this_process(call: Callable[[], None]) -> Callable[[], None]:
    """A fork of this process inherits what is to be done at its end, and shall not do it."""
    pid = os.getpid()
    return lambda: call() if os.getpid() == pid else None


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _facts(environ: Mapping[str, str], rank: int, attempt: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "pid": os.getpid(),
        "attempt": attempt,
        "world_size": _number(environ, "WORLD_SIZE") or 1,
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


def _torch_facts() -> dict[str, Any]:
    torch = sys.modules["torch"]
    facts: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        facts["backend"] = dist.get_backend()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        facts["device"] = torch.cuda.get_device_name()
    return facts


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
    """A child of a rank is no rank."""
    global _recorder
    if _recorder is not None:
        _recorder.forget()
        _recorder = None


def _end() -> None:
    if _recorder is not None:
        _recorder.close(ended=True)
