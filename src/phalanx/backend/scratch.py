"""Tensors that come and go in a piece of the shared heap: what FSDP2 gathers parameters into, layer by layer."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor

from phalanx.backend.shared import shared_empty
from phalanx.errors import PhalanxError

_LINE = 128
_LARGEST_BYTES = 1 << 36  # addresses; what nobody uses has no pages


class Scratch:
    """A piece of this rank's heap, and the blocks in it. Collective: all ranks build theirs.

    Each rank places its own blocks, wherever there is room: collectives find tensors at any offset. A block is used
    again when its tensor has died, for a tensor of the same size.
    """

    def __init__(self, group: Any) -> None:
        symm_mem = group.symm_mem
        self._nbytes = min(_LARGEST_BYTES, symm_mem.heap_bytes // 4)
        try:
            self._memory = shared_empty(self._nbytes, dtype=torch.uint8, group=group)
        except PhalanxError:  # memory that lies in a file system is reserved, and there is not as much; on all ranks
            self._nbytes = 0
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor of `count` elements; in ordinary memory where there is no room left."""
        nbytes = -(-count * dtype.itemsize // _LINE) * _LINE
        free = self._free.setdefault(nbytes, [])
        if free:
            offset = free.pop()
        elif 0 < nbytes <= self._nbytes - self._end:
            offset, self._end = self._end, self._end + nbytes
        else:
            return torch.empty(count, dtype=dtype)
        buffer = (ctypes.c_char * nbytes).from_address(self._memory.data_ptr() + offset)
        # The block keeps the heap, through this bound method, until its tensor dies.
        weakref.finalize(buffer, self._let_go, nbytes, offset).atexit = False
        return torch.frombuffer(buffer, dtype=dtype, count=count)

    def _let_go(self, nbytes: int, offset: int) -> None:
        self._free[nbytes].append(offset)
