"""The machine's memory, as a contestant: each rank copies its own buffer, all ranks at once, nothing is shared.

As many bytes are read and written as an all_reduce of that size needs at least (Case.least_traffic), so its time is the
floor under the other columns, and its bandwidth at the largest size is the machine's.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from cases import Case

from contestants.contract import BoundCall, Contestant, NotOfferedError, Options


class MemoryContestant:
    """A rank that copies."""

    def __init__(self, max_count: int) -> None:
        self._source, self._target = np.zeros(max_count, np.float32), np.zeros(max_count, np.float32)

    def bind(self, case: Case) -> BoundCall:
        if case.op != "copy":
            raise NotOfferedError("memory only copies")
        source, target = self._source[: case.source_count], self._target[: case.target_count]
        return BoundCall(partial(np.copyto, target, source), source, target)

    def barrier(self) -> None:
        """Nothing: the driver starts all ranks together, and a measurement is long against the difference."""

    def close(self) -> None:
        """Nothing to leave."""


def connect(rank: int, world_size: int, max_count: int, options: Options) -> Contestant:
    """There is nobody to connect to."""
    return MemoryContestant(max_count)
