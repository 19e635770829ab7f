"""Measure the time of each part of a step."""

from __future__ import annotations

import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


class Clock:
    """It has the seconds of each part, one entry per step; a part that is entered twice in a step is added up."""

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Clock one step."""
        self._steps.append(defaultdict(float))
        with self.part("step"):
            yield

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Yield a part of the step that has begun last."""
        begin = time.perf_counter()
        yield
        self._steps[-1][name] += time.perf_counter() - begin

    def add(self, **amounts: float) -> None:
        """Add `amounts` that were measured elsewhere to the parts of these names."""
        for name, amount in amounts.items():
            self._steps[-1][name] += amount

    def medians(self, skip: int) -> Mapping[str, float]:
        """Return the median of each part, without the first `skip` steps."""
        names = {name for step in self._steps for name in step}
        return {name: statistics.median(step.get(name, 0.0) for step in self._steps[skip:]) for name in names}


class ClockedForward(nn.Module):
    """It runs `module`, and notes for each forward what it took.

    It notes the wall time, how long a processor worked for its thread, and how often the thread stopped. In the rest of
    the wall time the thread stood still: it waited for the interpreter (which runs one thread of a process at a time,
    the GIL), or for a core.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._runs: list[tuple[float, float, int]] = []  # all replicas share the list

    def forward(self, *args: Any) -> Any:
        """Return what `module` returns."""
        stops, begin, begin_cpu = _stops(), time.perf_counter(), time.thread_time()
        output = self.module(*args)
        self._runs.append((time.perf_counter() - begin, time.thread_time() - begin_cpu, _stops() - stops))
        return output

    def take(self) -> tuple[float, float, int]:
        """Return wall and processor seconds and stops of the slowest forward since the last call."""
        slowest = max(self._runs)
        self._runs.clear()
        return slowest


COUNTS_STOPS = hasattr(resource, "RUSAGE_THREAD")  # only Linux has it


def _stops() -> int:
    """Return how often this thread has given up its core to wait for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if COUNTS_STOPS else 0
