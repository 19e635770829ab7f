"""Run one rank of `run_ranks` in a separate process."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from phalanx._base.processes import die_with_parent
from phalanx._job.launch.calls import outcome
from phalanx._job.launch.calls.payload import decode, encode_value

# The parent sends it to a late rank; faulthandler answers without the interpreter's help.
SHOW_STACK = signal.SIGUSR2


@dataclass(frozen=True)
class RankTask:
    """A `RankTask` is the input of a rank.

    `folder` belongs to the run: the store, the outcomes and the stacks are in it.
    """

    call: tuple[Callable[..., Any], tuple[Any, ...]] | bytes  # pickled, if this process was not forked with it
    rank: int
    world_size: int
    backend: str | None
    group_timeout_s: float
    folder: Path
    parent: int

    @property
    def outcome_path(self) -> Path:
        """Return the path of the outcome, which appears atomically."""
        return self.folder / f"outcome-{self.rank}"

    @property
    def stack_path(self) -> Path:
        """Return the path of the stack, written when the rank crashes or is asked for it."""
        return self.folder / f"stack-{self.rank}"


def work(task: RankTask) -> None:
    """Join the group, call the function, leave the group, and write the outcome."""
    die_with_parent(task.parent)
    # Garbage collections of this rank skip the parent's objects: visiting each would copy all of their pages, and
    # destroy objects still in use there (a store's thread that is not in this process cannot be joined: SIGABRT).
    gc.freeze()
    os.setpgrp()  # so that the parent can end this rank together with its children
    with task.stack_path.open("w") as stack:
        faulthandler.enable(stack)
        faulthandler.register(SHOW_STACK, stack)
        dumps = encode_value if isinstance(task.call, bytes) else pickle.dumps
        outcome.write(task.outcome_path, outcome.call(task.rank, lambda: _call(task)), dumps)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads that the function left must not keep the rank; the parent has the outcome


def _call(task: RankTask) -> Any:
    with _group(task):
        fn, args = task.call if not isinstance(task.call, bytes) else decode(task.call)[:2]
        return fn(task.rank, task.world_size, *args)


@contextlib.contextmanager
def _group(task: RankTask) -> Iterator[None]:
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
        # A rank whose function sends nothing may end while another is still connecting to it, whose start then fails:
        # "Connection closed by peer".
        store.set(f"connected/{task.rank}", "")
        others = [f"connected/{rank}" for rank in range(task.world_size)]
        store.wait(others, timedelta(seconds=task.group_timeout_s))
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
