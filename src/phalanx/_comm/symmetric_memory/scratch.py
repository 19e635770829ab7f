"""Allocate short-lived tensors in symmetric memory; FSDP2 gathers parameters into them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.errors import PhalanxError

_LINE = 128
_LARGEST_BYTES = 1 << 36  # address space; unused memory has no pages


class Scratch:
    """A `Scratch` places tensors in `piece`, a part of this rank's heap.

    Each rank places its blocks wherever there is room, because collectives accept tensors at any offset. When a tensor
    dies, its block is reused for the next tensor of the same size.
    """

    def __init__(self, piece: Tensor) -> None:
        self._memory = piece
        self._nbytes = piece.numel()
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor of `count` elements; in ordinary memory if there is no room left."""
        nbytes = -(-count * dtype.itemsize // _LINE) * _LINE
        free = self._free.setdefault(nbytes, [])
        if free:
            offset = free.pop()
        elif 0 < nbytes <= self._nbytes - self._end:
            offset, self._end = self._end, self._end + nbytes
        else:
            return torch.empty(count, dtype=dtype, device="cpu")
        buffer = (ctypes.c_char * nbytes).from_address(self._memory.data_ptr() + offset)
        # The block keeps the heap alive, through this bound method, until its tensor dies.
        weakref.finalize(buffer, self._release, nbytes, offset).atexit = False
        return torch.frombuffer(buffer, dtype=dtype, count=count)

    def _release(self, nbytes: int, offset: int) -> None:
        self._free[nbytes].append(offset)


def open_scratch(heap_bytes: int, allocate: Callable[[int], Tensor]) -> Scratch:
    """Return a `Scratch` in a quarter of the heap, at most 64 GiB, or an empty one. All ranks call this together."""
    try:
        piece = allocate(min(_LARGEST_BYTES, heap_bytes // 4))
    except PhalanxError:  # on all ranks: the heap is in a file system without enough room
        piece = torch.empty(0, dtype=torch.uint8, device="cpu")
    return Scratch(piece)
