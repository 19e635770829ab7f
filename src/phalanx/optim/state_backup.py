"""Back up each rank's optimizer state, so that it survives the rank: two slots in memory that the host's ranks map.

update of step k    this rank's state changes, in its own memory
then                slot k%2: number -1; the state; number k
sync B              after it, all ranks have the state of step k; before it, that of step k-1 is intact
"""

from __future__ import annotations

import itertools
import pickle
import struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.log import get_logger, warn_once
from phalanx._comm.backend.shared import host_memory
from phalanx._comm.backend.skeleton import Leaf, join, leaves_of, split
from phalanx._comm.transport.memory_order import Strides, find_strides, lay_out
from phalanx._comm.transport.tensors import copy_all

_logger = get_logger(__name__)
_HEAD = struct.Struct("qQ")  # the number of the step, and the length of the pickled structure
_ALIGN = 64
_TIMES = 8  # room for this many four-byte values per element: Adam has two, in the parameter's own dtype


class StateBackup:
    """A `StateBackup` has room for each rank's state of `num_elements` elements in `num_parameters` parameters.

    Construction is collective. If the ranks do not share memory, each keeps its state in its own memory.
    """

    def __init__(self, group: Any, num_elements: int, num_parameters: int) -> None:
        self.slot_bytes = _round_up((1 << 20) + num_parameters * 4096 + _TIMES * 4 * num_elements, 4096)
        self._by_rank = host_memory(2 * self.slot_bytes, group)
        self._memory = self._by_rank[group.rank()]
        self._bytes = memoryview(_array(self._memory))
        for slot in range(2):
            _HEAD.pack_into(_array(self._memory), slot * self.slot_bytes, -1, 0)
        if group.size() > 1:
            dist.barrier(group=group)  # an uninitialised number must not be read

    def save(self, number: int, state: Any) -> None:
        """Write this rank's state after step `number`."""
        slot = number % 2
        start = slot * self.slot_bytes
        tensors: list[Tensor] = []
        structure = split(state, tensors)
        self._bytes[start : start + 8] = (-1).to_bytes(8, "little", signed=True)
        pickled = pickle.dumps(structure)
        offsets = [
            *itertools.accumulate((_round_up(t.nbytes, _ALIGN) for t in tensors), initial=_begin_of_tensors(pickled))
        ]
        if offsets[-1] > self.slot_bytes:
            warn_once(_logger, "the optimizer's state is too large to be backed up: the job ends when a rank is lost")
            return
        self._bytes[start + _HEAD.size : start + _HEAD.size + len(pickled)] = pickled
        places = self._places(self._memory[start:], tensors, offsets)
        if tensors:
            copy_all(places, tensors)
        _HEAD.pack_into(self._bytes, start, -1, len(pickled))
        # The number is written last, since it marks the rest as valid.
        self._bytes[start : start + 8] = number.to_bytes(8, "little", signed=True)

    @staticmethod
    def _places(memory: Tensor, tensors: list[Tensor], offsets: list[int]) -> list[Tensor]:
        return [memory[at : at + t.nbytes].view(t.dtype).view(t.shape) for at, t in zip(offsets, tensors, strict=False)]

    def read(self, number: int) -> list[Any] | None:
        """Return a copy of the state of each rank after step `number`; None if any rank's state is missing."""
        if not self.has_all(number):
            return None
        return [self.read_of(rank, number) for rank in self._by_rank]

    def has_all(self, number: int) -> bool:
        """Return whether every rank's state after step `number` is backed up (see `has`)."""
        return all(self.has(rank, number) for rank in self._by_rank)

    def has(self, rank: int, number: int) -> bool:
        """Return whether this rank can read the state of `rank` after step `number`."""
        found: int = _HEAD.unpack_from(_array(self._slot(rank, number)))[0]
        return found == number

    def read_of(self, rank: int, number: int) -> Any:
        """Return a copy of the state of `rank` after step `number`; `has` must be true for it."""
        slot = self._slot(rank, number)
        _, length = _HEAD.unpack_from(_array(slot))
        pickled = _array(slot[_HEAD.size : _HEAD.size + length]).tobytes()
        structure = pickle.loads(pickled)
        leaves = leaves_of(structure)
        forms = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in leaves]
        offsets = [
            *itertools.accumulate((_round_up(t.nbytes, _ALIGN) for t in forms), initial=_begin_of_tensors(pickled))
        ]
        places = self._places(slot, forms, offsets)
        copies = [lay_out(place.clone(), _strides(leaf)) for place, leaf in zip(places, leaves, strict=True)]
        return join(structure, [copy.to(leaf.device) for copy, leaf in zip(copies, leaves, strict=True)])

    def _slot(self, rank: int, number: int) -> Tensor:
        return self._by_rank[rank][number % 2 * self.slot_bytes :][: self.slot_bytes]


def _strides(leaf: Leaf) -> Strides | None:
    return find_strides(torch.empty_strided(leaf.shape, leaf.stride, device="meta"))


def _begin_of_tensors(structure: bytes) -> int:
    return _round_up(_HEAD.size + len(structure), _ALIGN)


def _round_up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


def _array(tensor: Tensor) -> Any:
    return tensor.numpy()
