"""What each rank alone knows of a step (its random states, its model's buffers), kept where the others can read it.

    forward of step n
    its backward begins        slot n%2: number -1; random states and buffers; number n          prepared
    gradients, update          ...                        (who has all gradients of step n knows that all prepared)
    commit of step n           if random numbers were drawn since: written anew, and the ranks wait for each other

A rank that dies leaves both slots in memory that the others map. Whoever completed step n had every rank's gradients,
and each rank gave them after it had prepared: so the slot of the agreed step is whole, whenever its rank died.

A survivor goes back to its own slot of that step.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.backend.shared import shared_empty, sharing_group
from phalanx.elastic import random_state
from phalanx.elastic.random_state import RandomStates
from phalanx.transport.tensors import copy_all

_HEAD = struct.Struct("q5Q")  # the number; the sizes of four random states and of the buffers
_RANDOM_BYTES = 16384  # 5056 torch's, 3.7 KiB Python's, 2.7 KiB NumPy's; and CUDA's
_PAGE = 4096


class Buffers:
    """The buffers of the models that train, by their places, so that one that is replaced is found."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        modules = {id(module): module for model in models for module in model.modules()}
        self._places = [
            (module._buffers, name)
            for module in modules.values()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._forms = [(t.shape, t.dtype) for t in self._tensors()]
        self.nbytes = sum(t.nbytes + 64 for t in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [t for place, name in self._places if (t := place[name]) is not None]

    def views(self, memory: Tensor) -> list[Tensor]:
        """One tensor for each buffer, in `memory`."""
        views, at = [], 0
        for shape, dtype in self._forms:
            nbytes = shape.numel() * dtype.itemsize
            views.append(memory[at : at + nbytes].view(dtype).view(shape))
            at += -(-nbytes // 64) * 64
        return views

    def save(self, views: Sequence[Tensor]) -> None:
        """Copy the buffers there."""
        tensors = self._tensors()
        if [(t.shape, t.dtype) for t in tensors] == self._forms and tensors:
            copy_all(list(views), [t.detach() for t in tensors])

    def versions(self) -> list[int]:
        """They differ where a buffer was changed in between."""
        return [tensor._version for tensor in self._tensors()]

    def load(self, views: Sequence[Tensor]) -> None:
        """Copy them back."""
        for tensor, view in zip(self._tensors(), views, strict=True):
            tensor.data.copy_(view)


class RankRecords:
    """This rank's two slots, and, where ranks share memory, everybody's. Collective to build."""

    def __init__(self, group: Any, models: Sequence[nn.Module], random: RandomStates) -> None:
        self._random = random
        self._buffers = Buffers(models)
        self._slot_bytes = -(-(_PAGE + _RANDOM_BYTES + self._buffers.nbytes) // _PAGE) * _PAGE
        nbytes = 2 * self._slot_bytes
        self.rank = group.rank()
        self._others: dict[int, Tensor] = {}
        ours = sharing_group(group)
        if ours is not None and group.size() > 1:
            self._memory: Tensor = shared_empty(nbytes, dtype=torch.uint8, group=group).zero_()
            own = self._memory.data_ptr()
            for rank in range(group.size()):  # it lies at one offset of every rank's heap
                address = own + (rank - group.rank()) * ours.symm_mem.heap_bytes
                array = (ctypes.c_char * nbytes).from_address(address)
                self._others[rank] = torch.frombuffer(array, dtype=torch.uint8)
        else:
            self._memory = torch.zeros(nbytes, dtype=torch.uint8)
        self._others[self.rank] = self._memory
        self._bytes = memoryview(_array(self._memory))
        self._slots = [self._memory[i * self._slot_bytes : (i + 1) * self._slot_bytes] for i in range(2)]
        self._views = [self._buffers.views(slot[_PAGE + _RANDOM_BYTES :]) for slot in self._slots]
        self._numbers = [-1, -1]
        self._captured: Any = None
        self._versions: list[int] = []
        for slot in range(2):
            _HEAD.pack_into(self._bytes, slot * self._slot_bytes, -1, 0, 0, 0, 0, 0)
        if group.size() > 1:
            dist.barrier(group=group)  # a number that nobody wrote must not be read

    @property
    def slot_bytes(self) -> int:
        """The size of what `read` gives."""
        return self._slot_bytes

    def prepare(self, number: int) -> None:
        """Write the slot of step `number` as this rank is now."""
        self._captured = states = self._random.capture()
        slot = number % 2
        start = slot * self._slot_bytes
        self._bytes[start : start + 8] = _NONE
        at = start + _PAGE
        for state in states:
            self._bytes[at : at + len(state)] = state
            at += len(state)
        if at > start + _PAGE + _RANDOM_BYTES:
            raise ValueError("the random states of this process do not fit")
        self._buffers.save(self._views[slot])
        self._versions = self._buffers.versions()
        _HEAD.pack_into(self._bytes, start, -1, *map(len, states), self._buffers.nbytes)
        self._bytes[start : start + 8] = number.to_bytes(8, "little", signed=True)  # last: it vouches for the rest
        self._numbers[slot] = number

    def is_prepared(self, number: int) -> bool:
        """Whether this rank's slot is of that step, and since then nothing was drawn, and no buffer changed."""
        return (
            self._numbers[number % 2] == number
            and self._buffers.versions() == self._versions
            and self._random.capture() == self._captured
        )

    def read(self, rank: int, number: int) -> Tensor | None:
        """A copy of what `rank` left of step `number`; None if it left nothing of it."""
        memory = self._others.get(rank)
        if memory is None:
            return None
        slot = memory[number % 2 * self._slot_bytes :][: self._slot_bytes]
        return slot.clone() if _number_of(slot) == number else None

    def restore_random(self, slot: Tensor) -> None:
        """Draw random numbers from where a slot says."""
        _, *sizes, _ = _HEAD.unpack_from(_array(slot))
        at, states = _PAGE, []
        for size in sizes:
            states.append(slot[at : at + size].numpy().tobytes())
            at += size
        random_state.restore((states[0], states[1], states[2], states[3]))

    def restore(self, slot: Tensor) -> None:
        """Become what a slot says."""
        self.restore_random(slot)
        self._buffers.load(self._buffers.views(slot[_PAGE + _RANDOM_BYTES :]))


_NONE = (-1).to_bytes(8, "little", signed=True)


def _number_of(slot: Tensor) -> int:
    number: int = _HEAD.unpack_from(_array(slot))[0]
    return number


def _array(tensor: Tensor) -> Any:
    return tensor.numpy()
