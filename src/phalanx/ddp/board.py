"""The mean where the gradients lie: buckets in the ranks' shared heap, no thread, no queue, no copy.

Each rank says which of its buckets are complete. Whoever passes by (each launch does) and finds a bucket complete on
all ranks adds up its own slice of it, straight from everybody's memory into everybody's memory. The picture and the
proof are in csrc/reducer.h.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.backend.shared_reducer import SharedReducer
from phalanx.ddp.bucket import DenseBucket


class BoardExchange:
    """Averages the buckets of one plan over the ranks of one host. Collective: all ranks build theirs.

    Every round takes every bucket once, in any order; a round ends with the first `wait`.
    Numerics: the sum in the order of the ranks, divided by their number; half types accumulate in float32.
    """

    scale = 1.0

    def __init__(self, group: dist.ProcessGroup, buckets: Sequence[DenseBucket]) -> None:
        filled = [bucket for bucket in buckets if bucket.plan.numel]  # an empty tensor lies nowhere
        self._numbers = {id(bucket): number for number, bucket in enumerate(filled)}
        self._board = SharedReducer(group, [_real(_content(bucket)) for bucket in filled], dist.ReduceOp.AVG)
        self._open = False

    def launch(self, bucket: DenseBucket) -> BoardExchange:
        """Say that this rank's bucket is complete, and reduce what all ranks have."""
        if not self._open:
            self._open = True
            self._board.begin()
        number = self._numbers.get(id(bucket))
        if number is not None:
            where = bucket.buffer if bucket.in_place is None else bucket.in_place
            self._board.ready(number, _real(where), _needed(bucket))
        return self

    @property
    def round(self) -> int:
        """How many rounds have begun. A rank that was out of some takes the others' number, between two rounds."""
        return self._board.round

    @round.setter
    def round(self, number: int) -> None:
        self._board.round = number

    def wait(self) -> None:
        """Return when every bucket of the round holds the mean, over the ranks that are in it."""
        if self._open:
            self._open = False
            self._board.finish()


def _content(bucket: DenseBucket) -> Tensor:
    """The bucket's memory; of a single gradient only that, since one that lies elsewhere has nothing behind it."""
    (first, *others) = bucket.plan.slots
    return bucket.buffer if others else bucket.buffer[: first.numel]


def _needed(bucket: DenseBucket) -> tuple[int, int] | None:
    """The elements that this rank needs of a bucket, as the board counts them: complex ones in two parts."""
    if bucket.needed is None:
        return None
    parts = 2 if bucket.plan.dtype.is_complex else 1
    return bucket.needed.start * parts, bucket.needed.stop * parts


def _real(buffer: Tensor) -> Tensor:
    """The mean of complex numbers is that of their parts."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
