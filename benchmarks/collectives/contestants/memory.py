"""The machine's memory, as a contestant: each rank copies or updates a buffer of its own, all ranks at once.

An update in place reads and writes as many bytes as an all_reduce of tensors that all ranks can see needs at least.
A copy costs the memory more than it counts: the processor also reads what it is about to overwrite.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from cases import COPY, UPDATE, Case

from contestants.contract import BoundCall, Contestant, NotOfferedError, Options


class MemoryContestant:
    """A rank that works alone."""

    def __init__(self, max_count: int) -> None:
        self._source, self._target = np.zeros(max_count, np.float32), np.zeros(max_count, np.float32)

    def bind(self, case: Case) -> BoundCall:
        source, target = self._source[: case.source_count], self._target[: case.target_count]
        if case.op == UPDATE:
            return BoundCall(partial(np.negative, source, out=source), source, source)
        if case.op != COPY:
            raise NotOfferedError("memory only copies and updates")
        return BoundCall(partial(np.copyto, target, source), source, target)

    def barrier(self) -> None:
        """Nothing: the driver starts all ranks together, and a measurement is long against the difference."""

    def close(self) -> None:
        """Nothing to leave."""


def connect(rank: int, world_size: int, max_count: int, options: Options) -> Contestant:
    """There is nobody to connect to."""
    return MemoryContestant(max_count)
