"""Do, in a process of its own, what one rank of `run_ranks` does."""

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

# The parent sends it to a rank that is late; faulthandler answers without the interpreter's help.
SHOW_STACK = signal.SIGUSR2


@dataclass(frozen=True)
class RankTask:
    """A task is what a rank is told. `folder` is the run's own: the store, the outcomes and the stacks lie in it."""

    call: tuple[Callable[..., Any], tuple[Any, ...]] | bytes  # the bytes of one that was not forked together with us
    rank: int
    world_size: int
    backend: str | None
    group_timeout_s: float
    folder: Path
    parent: int

    @property
    def outcome_path(self) -> Path:
        """Return where the outcome appears, whole or not at all."""
        return self.folder / f"outcome-{self.rank}"

    @property
    def stack_path(self) -> Path:
        """Return where the stack appears when the rank crashes or is asked for it."""
        return self.folder / f"stack-{self.rank}"


def work(task: RankTask) -> None:
    """Join the group, call the function, leave the group, and write down how it went."""
    die_with_parent(task.parent)
    # Collections of this rank do not look at the parent's objects again: each would copy all of their pages, and end
    # objects that live on there (a store's thread that is not in this process cannot be joined: SIGABRT).
    gc.freeze()
    os.setpgrp()  # so that the parent can end this rank together with whatever it started
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
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # it is for a torch that the function imports later
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # ranks share the cores, and the pools of a forked parent are not usable anyway
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
