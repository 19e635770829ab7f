"""A `Fault` makes a rank fail at a chosen step; the code under test calls `strike` at each step.

fault = faults.kill(rank=1, step=3)

def train(rank, world_size):
    for step in range(10):
        fault.strike(rank, step)      # rank 1 dies here by SIGKILL when step is 3
        dist.all_reduce(loss)

run_ranks(train, 3, lost=(1,))
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A `Fault` makes `rank` fail at `step`. The fault is real: the process dies, stops or sleeps."""

    rank: int
    step: int
    happen: Callable[[], None]

    def strike(self, rank: int, step: int = 0) -> None:
        """Trigger the fault if `rank` and `step` are the chosen ones; otherwise do nothing."""
        if (rank, step) == (self.rank, self.step):
            self.happen()


def kill(rank: int, *, step: int = 0) -> Fault:
    """Return a fault that kills `rank` with SIGKILL, as the OOM killer does: no handler and no exit hook runs."""
    return Fault(rank, step, functools.partial(_signal_self, signal.SIGKILL))


def stop(rank: int, *, step: int = 0) -> Fault:
    """Return a fault that stops `rank` with SIGSTOP: the process exists but does not answer, as if its host hung."""
    return Fault(rank, step, functools.partial(_signal_self, signal.SIGSTOP))


def leave(rank: int, *, step: int = 0, exit_code: int = 1) -> Fault:
    """Return a fault that ends `rank` with `os._exit`: no exit hook runs, and the peers are not notified."""
    return Fault(rank, step, functools.partial(os._exit, exit_code))


def delay(rank: int, *, step: int = 0, seconds: float) -> Fault:
    """Return a fault that delays `rank` by `seconds`, as a slow input would."""
    return Fault(rank, step, functools.partial(time.sleep, seconds))


def _signal_self(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
