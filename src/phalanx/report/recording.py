"""A process that records its steps for a report: when that begins, what is known of it, when it ends."""

from __future__ import annotations

import atexit
import os
import platform
import socket
import sys
from collections.abc import Mapping
from typing import Any

import phalanx
from phalanx.backend.torch_patches import observe_steps
from phalanx.diagnostics.step_recorder import StepRecorder
from phalanx.report.job_record import RANKS

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
        os.register_at_fork(after_in_child=_forget)
        atexit.register(_end)
        observe_steps(_recorder)
    return _recorder


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
