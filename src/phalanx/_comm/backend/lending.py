"""Lend a tensor without a copy: another rank of the host reads it in place, and returns it after use.

lender                                              borrower
with lending.making(): y = layer(x)                 .
place = lending.lend(y)       -- place, shape -->   y = lending.borrow(rank, place, shape, dtype)
(keeps y)                                           uses y, as long as necessary
(releases y, whose memory is reused)      <-- a word in shared memory is set when y dies
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from phalanx._comm.backend.process_group import PhalanxProcessGroup
from phalanx._comm.backend.shared import shared_empty
from phalanx._comm.symmetric_memory.pool import SharedPool

_PIECES = 1024  # the maximum number of tensors that a rank may have lent at the same time
_WORD = 40  # this many low bits of a place are an offset in the heap; the bits above are the number of the piece


class Lending:
    """A `Lending` lends and borrows tensors for one rank. All ranks of `group` create theirs together.

    Arguments:
        sizes: the maximum number of tensors lent at the same time, by size in bytes; the same on all ranks.
    """

    def __init__(self, group: PhalanxProcessGroup, sizes: Mapping[int, int]) -> None:
        self._symm_mem = group.symm_mem
        self._rank = group.rank()
        self._memory: list[Tensor] = []
        self._pool = SharedPool(group.symm_mem, sizes, lambda nbytes: self._allocate(group, nbytes))
        # Tensors of the pool may outlive this object, for example a gradient. A closed pool keeps their memory.
        weakref.finalize(self, self._pool.close).atexit = False
        # Each piece that a rank may lend has a word, which the borrower sets to return the piece.
        words = shared_empty(group.size() * _PIECES, dtype=torch.int32, group=group, owner=0)
        if self._rank == 0:
            words.zero_()
        group.barrier().wait()
        self._words = words.view(group.size(), _PIECES).numpy()
        self._memory.append(words)
        self._lent: dict[int, Tensor] = {}
        self.copied = 0
        """The number of tensors that were not created in `making()` and had to be copied."""
        self._free = list(range(_PIECES))

    def _allocate(self, group: PhalanxProcessGroup, nbytes: int) -> Tensor:
        memory = shared_empty(nbytes, dtype=torch.uint8, group=group)
        self._memory.append(memory)
        return memory

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """In the block, create this thread's tensors of the given sizes in memory that other ranks can read."""
        was_inside = self._pool.enter()
        try:
            yield
        finally:
            if not was_inside:
                self._pool.leave()

    def lend(self, tensor: Tensor) -> int | None:
        """Lend `tensor`, and return its place for a borrower; None if no room is left, or its size is not in `sizes`.

        Cost: nothing if the tensor was created in `making()`; else one copy.
        """
        self.collect()
        if not self._pool.serves(tensor.numel() * tensor.element_size()) or not self._free:
            return None
        if not (self._pool.contains(tensor) and tensor.is_contiguous()):
            shape = tuple(tensor.shape)
            strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
            made = self._pool.empty_strided(shape, strides, tensor.dtype)
            if made is None:
                return None
            tensor = made.copy_(tensor)
            self.copied += 1
        piece = self._free.pop()
        self._words[self._rank, piece] = 0
        self._lent[piece] = tensor
        return piece << _WORD | self._symm_mem.heap_offset(tensor.data_ptr())

    def collect(self) -> None:
        """Release the tensors that borrowers have returned."""
        words = self._words[self._rank]
        for piece in [piece for piece in self._lent if words[piece]]:
            del self._lent[piece]
            self._free.append(piece)

    def borrow(self, rank: int, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor that `rank` lent at `place`. Its memory is returned when no tensor uses it any longer."""
        address = self._symm_mem.address_of(rank, place & ((1 << _WORD) - 1))
        buffer = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(address)
        weakref.finalize(buffer, self._return, rank, place >> _WORD).atexit = False
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def _return(self, rank: int, piece: int) -> None:
        self._words[rank, piece] = 1
