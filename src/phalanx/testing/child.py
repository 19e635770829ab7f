"""What one rank of `run_ranks` does, in its own process."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from phalanx.testing.outcome import Outcome

# The parent sends it to a rank that is late; faulthandler answers without the interpreter's help.
SHOW_STACK = signal.SIGUSR2
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Task:
    """What a rank is told. `folder` is the run's own: the store, the outcomes and the stacks lie in it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    backend: str | None
    group_timeout_s: float
    folder: Path
    parent: int

    @property
    def outcome_path(self) -> Path:
        """Where the outcome appears, whole or not at all."""
        return self.folder / f"outcome-{self.rank}"

    @property
    def stack_path(self) -> Path:
        """Where the stack appears when the rank crashes or is asked for it."""
        return self.folder / f"stack-{self.rank}"


def work(task: Task) -> None:
    """Join the group, call the function, leave the group, and write down how it went."""
    _die_with_parent(task.parent)
    os.setpgrp()  # so that the parent can end this rank together with whatever it started
    with task.stack_path.open("w") as stack:
        faulthandler.enable(stack)
        faulthandler.register(SHOW_STACK, stack)
        _write(task, _outcome(task))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads that the function left must not keep the rank; the parent has the outcome


def _outcome(task: Task) -> Outcome:
    try:
        with _group(task):
            result = task.fn(task.rank, task.world_size, *task.args)
    except BaseException as error:
        return Outcome(task.rank, story=_story(error), error=error)
    return Outcome(task.rank, result=result)


@contextlib.contextmanager
def _group(task: Task) -> Iterator[None]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for a torch that the function imports later
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # ranks share the cores, and the pools of a forked parent are not usable anyway
    if task.backend is None:
        yield
        return

    import torch.distributed as dist

    store = dist.FileStore(str(task.folder / "store"), task.world_size)  # type: ignore[attr-defined] # torch hides it
    dist.init_process_group(
        task.backend,
        store=store,
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.group_timeout_s),
    )
    if task.backend == "gloo":
        # A rank whose function has nothing to say to the others may end while another is still connecting to it, and
        # that one's start fails: "Connection closed by peer".
        store.set(f"connected/{task.rank}", "")
        others = [f"connected/{rank}" for rank in range(task.world_size)]
        store.wait(others, timedelta(seconds=task.group_timeout_s))
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _story(error: BaseException) -> str:
    return f"raised {type(error).__name__}\n" + "".join(traceback.format_exception(error))


def _write(task: Task, outcome: Outcome) -> None:
    draft = task.outcome_path.with_suffix(".draft")
    draft.write_bytes(_pickled(outcome))
    draft.rename(task.outcome_path)


def _pickled(outcome: Outcome) -> bytes:
    # Plain pickle: that of multiprocessing would pass tensors as handles of a process that is about to end.
    try:
        data = pickle.dumps(outcome)
        if outcome.error is not None:
            pickle.loads(data)  # an exception with its own constructor often pickles and then does not come back
        return data
    except Exception as problem:
        if outcome.error is not None:
            return pickle.dumps(Outcome(outcome.rank, story=outcome.story))
        kind = type(outcome.result).__name__
        return pickle.dumps(
            Outcome(outcome.rank, story=f"returned a {kind}, which cannot be pickled\n{_story(problem)}")
        )


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this rank when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)
