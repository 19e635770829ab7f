"""An area is a rank's memory on a device that the other ranks read; it has two halves, which take turns.

    exchange n     each rank writes half n & 1 of its area; all meet; each reads that half of all areas
    exchange n+1   the other half

All that a rank queues lies on one stream, and it meets the others when the stream has come to the end of what the rank
writes. So whoever has met the others in exchange n + 1 knows that all have read what they need of exchange n, and may
write that half again in exchange n + 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.engines.device_memory import MappedMemory

AREA_BYTES = 64 << 20
_ALIGNMENT = 256


class Areas:
    """It holds all ranks' areas, as this rank maps them. `turn` is the number of the exchange that comes next."""

    def __init__(self, rank: int, mapped: Sequence[MappedMemory], area_bytes: int = AREA_BYTES) -> None:
        self.turn = 0
        self._rank = rank
        self._mapped = mapped
        self._half_bytes = area_bytes // 2 // _ALIGNMENT * _ALIGNMENT

    def pieces(self, count: int, itemsize: int, slots: int) -> Iterator[tuple[int, int]]:
        """Cut `count` elements so that a piece of each of `slots` tensors fits into a half; into one piece at least."""
        step = max(1, self._slot_bytes(slots) // itemsize)
        return ((start, min(start + step, count)) for start in range(0, max(count, 1), step))

    def write(self, pieces: Sequence[Tensor]) -> None:
        """Queue the copies of `pieces`, one for each slot, into this rank's area, for the exchange that comes next."""
        for slot, piece in enumerate(pieces):
            if piece.numel():
                self._view(self.turn, self._rank, slot, len(pieces), piece.numel(), piece.dtype).copy_(piece)

    def met(self) -> None:
        """Go on to the next exchange: all ranks have met."""
        self.turn += 1

    def read(self, rank: int, slot: int, slots: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return what `rank` has written into a slot in the exchange at which all met last."""
        return self._view(self.turn - 1, rank, slot, slots, count, dtype)

    def _view(self, turn: int, rank: int, slot: int, slots: int, count: int, dtype: torch.dtype) -> Tensor:
        at = (turn & 1) * self._half_bytes + slot * self._slot_bytes(slots)
        return self._mapped[rank].tensor[at : at + count * dtype.itemsize].view(dtype)

    def _slot_bytes(self, slots: int) -> int:
        return self._half_bytes // slots // _ALIGNMENT * _ALIGNMENT

    def close(self) -> None:
        """Unmap the areas. What was queued on the device must be over."""
        for mapped in self._mapped:
            mapped.close()
