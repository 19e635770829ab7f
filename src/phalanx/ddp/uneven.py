"""Handle ranks that run out of data before others: say so, refuse what cannot work, and let them catch up.

              rank 0                rank 1                     rank 2: 2 batches
 step 2       mean of 3             mean of 3                  mean of 3
 step 3       mean of 2             mean of 2                  waits in barrier
 step 4       mean of 2             mean of 2                      |
 barrier      ---------------- all are here -----------------------|
              rank 0's parameters, buffers, counts of steps  ----> |
 next epoch   mean of 3             mean of 3                  mean of 3

`transport/uneven.py` and csrc/uneven.h describe how the ranks that go on agree on which ranks are out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from phalanx.backend.shared import sharing_group
from phalanx.backend.shared_updates import has_shared_update
from phalanx.core_numbers import LEFT, MISMATCH
from phalanx.diagnostics.divergence import EVEN_ADVICE
from phalanx.diagnostics.flight_recorder import read_position
from phalanx.diagnostics.rank_list import name_ranks
from phalanx.errors import MismatchError
from phalanx.log import get_logger

_logger = get_logger("phalanx.ddp")


class UnevenInputs:
    """`UnevenInputs` has what the ranks that go on notice of the others. Each wrapper has one, if its group can do
    without ranks.

    Cost: until some rank is out, one call of the core per step.
    """

    def __init__(self, group: Any, parameters: Iterable[Tensor]) -> None:
        self._group = group
        self._sharing = sharing_group(group)
        self._parameters = list(parameters)
        self._said = False

    def look(self, absent: Sequence[int], num_steps: int) -> None:
        """Look at the end of a step without `absent`, after `num_steps` that were made with all; log the first time.

        Raises:
            MismatchError: parameters lie in memory of which each rank updates a part, and no rank would update theirs.
        """
        if not absent:
            return
        if are_shared(self._parameters, self._group):
            assert self._sharing is not None
            self._sharing.symm_mem.core.set_poison(MISMATCH, self._group.rank())
            raise MismatchError(
                f"DistributedDataParallel on rank {self._group.rank()}: {name_ranks(absent)} ran out of data after "
                f"{_steps(num_steps)}, and with ZeroRedundancyOptimizer every rank updates a part of the parameters, "
                f"which no other rank can update. {EVEN_ADVICE}."
            )
        if self._said:
            return
        self._said = True
        present = [rank for rank in range(self._group.size()) if rank not in absent]
        if self._group.rank() == present[0]:
            _logger.warning("%s", describe(absent, present, num_steps, self._positions(absent)))

    def _positions(self, absent: Sequence[int]) -> list[str]:
        assert self._sharing is not None  # the group does without ranks
        core = self._sharing.symm_mem.core
        return ["has left" if core.state(rank)[0] == LEFT else str(read_position(core, rank)) for rank in absent]


def are_shared(parameters: Iterable[Tensor], group: Any) -> bool:
    """Return whether ranks share some parameter or its master, of which each updates a part, as ZeroRedundancyOptimizer
    does; on several hosts the ranks of each host do.
    """
    ours = sharing_group(group)
    return any(
        has_shared_update(parameter) or (ours is not None and ours.symm_mem.holds(parameter.data_ptr()))
        for parameter in parameters
    )


def describe(absent: Sequence[int], present: Sequence[int], num_steps: int, positions: Sequence[str]) -> str:
    """Return the line about ranks that are out of a step for the first time; `positions` say where they are instead."""
    where = "; ".join(f"rank {rank} {position}" for rank, position in zip(absent, positions, strict=True))
    go_on = f"{name_ranks(present)} {'goes' if len(present) == 1 else 'go'} on, averaging over those that are left"
    return f"{name_ranks(absent)} ran out of data after {_steps(num_steps)} ({where}); {go_on}"


def decide_source(num_steps: Sequence[int]) -> int | None:
    """Return the lowest rank that made the most of the ranks' numbers of steps; None if all made as many."""
    return None if len(set(num_steps)) == 1 else num_steps.index(max(num_steps))


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"
