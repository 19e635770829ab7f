"""Run a function on several ranks, each in a real process, and return the results."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from phalanx._base.deadline import Deadline
from phalanx._base.processes import die_with_parent, read_state
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._job.launch.calls import outcome, payload
from phalanx._job.launch.calls.outcome import RankOutcome, describe_exit
from phalanx.errors import PhalanxError

_POLL_S = 0.05  # between checks of exit codes, because a child of a rank may keep the sentinel open


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "phalanx",
    timeout: float | timedelta = 300.0,
    init: bool = True,
    lost: Collection[int] = (),
    start: Literal["fork", "spawn"] | None = None,
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` in `world_size` processes, and return the results by rank.

    Each rank has one intra-op thread and, with `init`, a default process group over `backend` whose timeout is half of
    `timeout`, so that the group itself reports a collective that never completes. Results are pickled. No process,
    descriptor or file is left behind.

    Arguments:
        fn: any function, from a module, `__main__` or a notebook; also a closure or a lambda.
        timeout: the limit for the whole run, in seconds or as a timedelta; make it long enough for a busy machine.
        init: with False, `fn` itself creates and destroys any process group.
        lost: ranks that the test itself kills or stops. They must not return, and must end or be stopped within
            `timeout`; their result is None.
        start: "fork" costs milliseconds and is the default on Linux; a caller with threads gets "spawn", which imports
            torch again in each rank, and sends functions that a rank cannot import as code, as `phalanx.launch` does.

    Raises:
        RankFailed: some ranks raised, died, or were still running when time was up; the message has all tracebacks.
        ValueError: `world_size`, `timeout`, `lost` or `start` is invalid.
        TypeError: "spawn" is used, and `fn` or `args` cannot be sent to another process.
    """
    deadline = Deadline.after(timeout)
    if world_size < 1:
        raise ValueError(f"world_size must be 1 or more, got {world_size}")
    if deadline.timeout_s in (0.0, math.inf):
        raise ValueError(f"timeout must be a finite span above zero, got {timeout!r}")
    if unknown := sorted(set(lost) - set(range(world_size))):
        raise ValueError(f"lost names ranks {unknown}, but the ranks are 0 to {world_size - 1}")

    context, call = _prepare(start, fn, args)
    if init:  # imported once here, not once in each forked rank
        import torch.distributed  # noqa: F401

        if backend and "phalanx" in backend and not isinstance(call, bytes):
            import phalanx._comm.backend.preloaded  # noqa: F401
    with tempfile.TemporaryDirectory(prefix="phalanx-ranks-", ignore_cleanup_errors=True) as folder:
        tasks = [
            _RankTask(
                call=call,
                rank=rank,
                world_size=world_size,
                backend=backend if init else None,
                group_timeout_s=deadline.timeout_s / 2,
                folder=Path(folder),
                parent=os.getpid(),
            )
            for rank in range(world_size)
        ]
        with _processes(context, tasks) as processes:
            _await([process for rank, process in enumerate(processes) if rank not in lost], deadline)
            _await([process for rank, process in enumerate(processes) if rank in lost], deadline, or_stopped=True)
            outcomes = [_outcome(task, process, lost) for task, process in zip(tasks, processes, strict=True)]
    if any(outcome.failed for outcome in outcomes):
        name = f"run_ranks of {getattr(fn, '__qualname__', repr(fn))}"
        raise RankFailed.of(outcomes, call=name, timeout_s=deadline.timeout_s)
    return [outcome.result for outcome in outcomes]


class RankFailed(PhalanxError):
    """Some ranks of a `run_ranks` call did not return. The message has the traceback or the last known stack of each.

    `errors` maps ranks to the exceptions that they raised, if these can be pickled; `results` maps the ranks that
    returned to their results; `running` lists the ranks that were still running when time was up.
    """

    def __init__(
        self,
        message: str,
        *,
        errors: dict[int, BaseException] | None = None,
        results: dict[int, Any] | None = None,
        running: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.errors = errors or {}
        self.results = results or {}
        self.running = running

    @classmethod
    def of(cls, outcomes: Sequence[RankOutcome], *, call: str, timeout_s: float) -> RankFailed:
        """Return the exception that reports every failed outcome, in rank order."""
        failed = [outcome for outcome in outcomes if outcome.failed]
        running = tuple(outcome.rank for outcome in failed if outcome.running)
        late = f", {name_ranks(running)} still running after {timeout_s:.1f} s" if running else ""
        title = f"{call} on {len(outcomes)} ranks: {name_ranks([o.rank for o in failed])} did not return{late}."
        return cls(
            "\n\n".join([title, *(f"--- rank {o.rank}: {o.text.rstrip()}" for o in failed)]),
            errors={o.rank: o.error for o in failed if o.error is not None},
            results={o.rank: o.result for o in outcomes if not o.failed},
            running=running,
        )


_Call = tuple[Callable[..., Any], tuple[Any, ...]] | bytes  # pickled, unless a forked rank inherits it


def _prepare(start: str | None, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[BaseContext, _Call]:
    """Return the context that starts the processes, and the call, which is pickled unless they inherit it."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if start is None:
        start = "fork" if sys.platform == "linux" and not others else "spawn"
    if start not in ("fork", "spawn"):
        raise ValueError(f"start must be 'fork' or 'spawn', got {start!r}")
    context: BaseContext = multiprocessing.get_context(start)
    if start == "fork":
        return context, (fn, args)
    try:
        return context, payload.encode(fn, args, {})
    except TypeError as error:
        reason = f" (chosen because these threads run, which a fork would lose: {', '.join(others)})"
        raise TypeError(f"run_ranks: start='spawn'{reason if others else ''}: {error}") from error


@contextlib.contextmanager
def _processes(context: BaseContext, tasks: Sequence[_RankTask]) -> Iterator[list[BaseProcess]]:
    """Yield one running process per task; at the end, kill all of them and their children."""
    processes: list[BaseProcess] = []
    try:
        for task in tasks:
            process: BaseProcess = context.Process(target=_work, args=(task,), name=f"rank {task.rank}")  # type: ignore[attr-defined]
            processes.append(process)
            with warnings.catch_warnings():
                # Python 3.12 and later also warn of native threads, but ranks do not use the threads of torch's pools.
                warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
                process.start()
        yield processes
    finally:
        for process in processes:
            _end(process)


def _end(process: BaseProcess) -> None:
    if process.pid is None:  # it was never started
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # does nothing if it has ended, but kills a process that has no group of its own yet
    process.join()
    process.close()


def _await(processes: Sequence[BaseProcess], deadline: Deadline, *, or_stopped: bool = False) -> None:
    """Wait until every process has ended (or, with `or_stopped`, is stopped), or until time is up."""
    while not deadline.passed:
        running = [p for p in processes if p.exitcode is None and not (or_stopped and _is_stopped(p))]
        if not running:
            return
        wait([process.sentinel for process in running], timeout=min(_POLL_S, deadline.left_s))


def _is_stopped(process: BaseProcess) -> bool:
    return process.pid is not None and read_state(process.pid) == "T"


def _outcome(task: _RankTask, process: BaseProcess, lost: Collection[int]) -> RankOutcome:
    exit_code = process.exitcode
    result = outcome.read(task.outcome_path, task.rank)
    if result is not None:
        if task.rank in lost and not result.failed:
            return RankOutcome(task.rank, text="is in `lost`, but its function returned")
        return result
    if task.rank in lost and (exit_code is not None or _is_stopped(process)):
        return RankOutcome(task.rank)
    if exit_code is None:
        return RankOutcome(
            task.rank, running=True, text=f"still running when time was up, here:\n{_stack(task, process)}"
        )
    crash = task.stack_path.read_text() if task.stack_path.exists() else ""
    return RankOutcome(task.rank, text=f"{describe_exit(exit_code)}\n{crash}")


def _stack(task: _RankTask, process: BaseProcess) -> str:
    """Return the stacks of a running rank's threads. A stopped rank is resumed so that it can write them."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, _SHOW_STACK)
        os.kill(process.pid, signal.SIGCONT)
    deadline = Deadline.after(1.0)
    text = seen = ""
    while not deadline.passed and not (text and text == seen):  # the same text twice: it is complete
        time.sleep(0.02)
        seen, text = text, task.stack_path.read_text() if task.stack_path.exists() else ""
    return text or "(its stack could not be read; it may not have started)"


# Run one rank in its own process.

# The parent sends this signal to a late rank; faulthandler writes the stacks without the interpreter's help.
_SHOW_STACK = signal.SIGUSR2


@dataclass(frozen=True)
class _RankTask:
    """A `_RankTask` is what a rank's process receives.

    `folder` belongs to the run; it contains the store, the outcomes and the stacks.
    """

    call: _Call
    rank: int
    world_size: int
    backend: str | None
    group_timeout_s: float
    folder: Path
    parent: int

    @property
    def outcome_path(self) -> Path:
        """Return the path of the outcome, which is written atomically."""
        return self.folder / f"outcome-{self.rank}"

    @property
    def stack_path(self) -> Path:
        """Return the path of the stacks, which are written when the rank crashes or receives `_SHOW_STACK`."""
        return self.folder / f"stack-{self.rank}"


def _work(task: _RankTask) -> None:
    """Join the group, call the function, leave the group, and write the outcome."""
    die_with_parent(task.parent)
    # Exclude the parent's objects from this rank's garbage collection. Traversing them would copy their pages, and
    # collecting one may abort: a store's destructor, for example, joins a thread that this process does not have.
    gc.freeze()
    os.setpgrp()  # so that the parent can kill this rank together with its children
    with task.stack_path.open("w") as stack:
        faulthandler.enable(stack)
        faulthandler.register(_SHOW_STACK, stack)
        dumps = payload.encode_value if isinstance(task.call, bytes) else pickle.dumps
        outcome.write(task.outcome_path, outcome.call(task.rank, lambda: _call(task)), dumps)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads that the function left must not keep the rank alive; the outcome is written


def _call(task: _RankTask) -> Any:
    with _group(task):
        fn, args = task.call if not isinstance(task.call, bytes) else payload.decode(task.call)[:2]
        return fn(task.rank, task.world_size, *args)


@contextlib.contextmanager
def _group(task: _RankTask) -> Iterator[None]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for a torch that the function imports later
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # ranks share the cores, and a forked parent's thread pools are unusable anyway
    if task.backend is None:
        yield
        return

    import torch.distributed as dist

    store = dist.FileStore(str(task.folder / "store"), task.world_size)
    dist.init_process_group(
        task.backend,
        store=store,
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.group_timeout_s),
    )
    if task.backend == "gloo":
        # Wait for all: a rank whose function sends nothing may end while a peer is still connecting to it, whose start
        # would then fail with "Connection closed by peer".
        store.set(f"connected/{task.rank}", "")
        others = [f"connected/{rank}" for rank in range(task.world_size)]
        store.wait(others, timedelta(seconds=task.group_timeout_s))
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
