"""What one rank of a trial does: its steps, its fault if it is the victim, and the report of what it was told."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch._dynamo  # a module's first call imports it: once here, not in every rank that is forked
import torch.distributed as dist
from plan import Step, Trial
from torch import nn

import phalanx
import phalanx._comm.backend.create
import phalanx.ddp

# No trial lasts as long: a rank that is told nothing is not saved by its timeout.
TIMEOUT = timedelta(seconds=600)


@dataclass(frozen=True)
class Report:
    """What a rank was told, and when (CLOCK_MONOTONIC); `ranks` in the numbering of the job."""

    rank: int
    error: str
    ranks: tuple[int, ...]
    raised_at: float
    step: str
    message: str


class Clock:
    """Times that outlive their writer: seconds in shared memory, one slot for the fault and one for each rank."""

    def __init__(self, memory: memoryview) -> None:
        self._slots = memory.cast("d")

    def strike(self) -> None:
        """The fault strikes now."""
        self._slots[0] = time.monotonic()

    def arrive(self, rank: int) -> None:
        """`rank` comes to the step at which the ranks differ."""
        self._slots[1 + rank] = time.monotonic()

    def fault_at(self, trial: Trial) -> float:
        """When it could first be known: a death when it happens, a mismatch when all have called."""
        if trial.is_mismatch:
            return max(self._slots[1 + rank] for rank in trial.steps[trial.at].ranks)
        return self._slots[0]


class Rank:
    """The groups and the model of one rank, and its way through the steps."""

    def __init__(self, trial: Trial, rank: int, store: str, clock: Clock) -> None:
        torch.set_num_threads(1)
        self.trial = trial
        self.rank = rank
        self.clock = clock
        dist.init_process_group(
            "phalanx",
            store=dist.FileStore(store, trial.world_size),
            rank=rank,
            world_size=trial.world_size,
            timeout=TIMEOUT,
        )
        self.groups = {tuple(range(trial.world_size)): dist.group.WORLD}
        part = dist.new_group(list(trial.part))
        self.groups.setdefault(trial.part, part)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
        self.model = phalanx.DistributedDataParallel(model)
        self.model(torch.ones(4, 64)).sum().backward()  # what a first round loads and allocates is no part of a step
        dist.barrier()

    def run(self) -> Report:
        """Go through the steps, again and again, until something is raised."""
        number = 0
        while True:
            step = self.trial.steps[number % len(self.trial.steps)]
            try:
                if number == self.trial.at:
                    step = self._come_to_the_fault(step)
                if self.rank in step.ranks:
                    self._call(step, torch.float32)
            except phalanx.PhalanxError as error:
                return self._report(step, error)
            number += 1

    def _report(self, step: Step, error: BaseException) -> Report:
        raised_at = time.monotonic()
        ranks = tuple(step.ranks[r] for r in getattr(error, "ranks", ()))
        return Report(self.rank, type(error).__name__, ranks, raised_at, f"{step}", str(error))

    def _come_to_the_fault(self, step: Step) -> Step:
        fault, victim = self.trial.fault, self.trial.victim == self.rank
        if self.trial.is_mismatch:
            self.clock.arrive(self.rank)
            return self._differ(step) if victim else step
        if victim and fault in _FROM_OUTSIDE:
            threading.Timer(self.trial.delay_s, self._die, (_FROM_OUTSIDE[fault],)).start()
        elif victim:
            self._die(_FROM_INSIDE[fault])
        return step

    def _die(self, end: Callable[[], None]) -> None:
        self.clock.strike()
        end()

    def _differ(self, step: Step) -> Step:
        """What the victim calls while the others call `step`."""
        fault = self.trial.fault
        if fault == "operation":
            return replace(step, operation="all_reduce" if step.operation in ("barrier", "backward") else "barrier")
        if fault == "size":
            return replace(step, count=step.count + 1)
        if fault == "root":
            return replace(step, root=step.ranks[(step.ranks.index(step.root) + 1) % len(step.ranks)])
        self._call(step, torch.float64)
        return replace(step, operation="barrier")  # where a message did not wait for its receiver

    def _call(self, step: Step, dtype: torch.dtype) -> None:
        group, size = self.groups[step.ranks], len(step.ranks)
        tensor, whole = torch.ones(step.count, dtype=dtype), torch.ones(step.count * size, dtype=dtype)
        is_root = step.root == self.rank
        match step.operation:
            case "all_reduce":
                dist.all_reduce(tensor, group=group)
            case "broadcast":
                dist.broadcast(tensor, step.root, group=group)
            case "reduce":
                dist.reduce(tensor, step.root, group=group)
            case "gather":
                dist.gather(tensor, list(whole.chunk(size)) if is_root else None, step.root, group=group)
            case "scatter":
                dist.scatter(tensor, list(whole.chunk(size)) if is_root else None, step.root, group=group)
            case "all_gather":
                dist.all_gather_into_tensor(whole, tensor, group=group)
            case "reduce_scatter":
                dist.reduce_scatter_tensor(tensor, whole, group=group)
            case "all_to_all":
                dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
            case "barrier":
                dist.barrier(group=group)
            case "asynchronous":
                works = [dist.all_reduce(tensor.clone(), group=group, async_op=True) for _ in range(3)]
                for work in works:
                    work.wait()
            case "messages":
                at = step.ranks.index(self.rank)
                right, left = step.ranks[(at + 1) % size], step.ranks[at - 1]
                # The victim of a mismatch expects what the others send; what it sends does not fit.
                expected = torch.empty(self.trial.steps[self.trial.at].count) if self._is_odd(step, dtype) else tensor
                sending = dist.isend(tensor, right, group=group)
                dist.recv(expected, left, group=group)
                sending.wait()
            case "backward":
                self.model(torch.ones(4, 64)).sum().backward()

    def _is_odd(self, step: Step, dtype: torch.dtype) -> bool:
        return dtype != torch.float32 or step.count not in {s.count for s in self.trial.steps}


def _segfault() -> None:
    faulthandler.disable()
    ctypes.string_at(0)


def _raise() -> None:
    raise ValueError("bad luck")


# Deaths that may strike anywhere, and those that a rank's own program brings about.
_FROM_OUTSIDE: dict[str, Callable[[], None]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": _segfault,
    "os._exit": lambda: os._exit(3),
}
_FROM_INSIDE: dict[str, Callable[[], None]] = {"sys.exit": lambda: sys.exit(4), "exception": _raise}


def work(trial: Trial, rank: int, store: str, clock: Clock) -> Report:
    """Run a rank; does not return on the victim of a death, which ends as a program does, with Python's exit hooks."""
    weakref.finalize._registry.clear()  # type: ignore[attr-defined] # those of the process that we were forked from
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        try:
            return Rank(trial, rank, store, clock).run()
        except SystemExit:
            pass
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)
        atexit._run_exitfuncs()
        os._exit(1)
