"""What each rank alone knows of a step, kept where the others can read it: a slot for each of three steps.

    forward of step n
    its backward begins        slot n%3: number -1; random states and buffers; number n          prepared
    gradients, update          ...                        (who has all gradients of step n knows that all prepared)
    commit of step n           slot n%3, apart: what is small (values, extra states); its checksum; number n
                               if ranks differ in that, or draw behind a backward: they wait for each other

A rank that dies leaves its slots in memory that the others map. Whoever completed step n had every rank's gradients,
and each rank gave them after it had prepared: so the slot of the agreed step is whole, whenever its rank died. What is
small is taken from there only where ranks differ in it; otherwise a survivor's is as good, and nobody waits.

The third slot is that of who has begun a step in which nobody has waited yet, while another still reads the first.

A slot says how its bytes are to be read, so that it doesn't matter what the buffers look like in the step after.
A survivor goes back to its own slot of that step.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.backend.shared import shared_empty, shares_memory
from phalanx.elastic import random_state
from phalanx.elastic.buffers import Buffers, views_of
from phalanx.elastic.frozen import Frozen
from phalanx.elastic.random_state import RandomStates

_HEAD = struct.Struct("q7Q")  # the number; sizes of four random states, of the buffers' plan, the buffers, their room
_SMALL_HEAD = struct.Struct("q5Q")  # the number; sizes of data, forms and tensors; their checksum; what the rank says
_SMALL_AT = 128
_RANDOM_BYTES = 16384  # 5056 torch's, 3.7 KiB Python's, 2.7 KiB NumPy's; and CUDA's
_PAGE = 4096
_SPARE = 1 << 18
_SLOTS = 3
_IS_LATE = 1


class Said(NamedTuple):
    """What the ranks' slots of a commit say: whether they differ in what is small, or change late what is prepared,
    and how much room they ask for.
    """

    differ: bool
    are_late: bool
    room: tuple[int, int]


class RankRecords:
    """This rank's slots, and, where ranks share memory, everybody's. Collective to build.

    `room`: bytes for buffers, and for what is small; the same on all ranks, 0 where they know of none yet.
    """

    def __init__(
        self, group: Any, layers: Mapping[str, nn.Module], random: RandomStates, room: tuple[int, int] = (0, 0)
    ) -> None:
        self._random = random
        self._buffers = Buffers(layers)
        self._buffers.look()
        self.rank = group.rank()
        wanted: list[Any] = [None] * group.size()
        mine = 2 * (self._buffers.nbytes + len(self._buffers.plan)), 0
        if group.size() > 1:
            dist.all_gather_object(wanted, mine, group=group)
        else:
            wanted = [mine]
        self.room = tuple(_to_pages(max(room[i], *(one[i] for one in wanted)) + _SPARE) for i in range(2))
        self._slot_bytes = _PAGE + _RANDOM_BYTES + sum(self.room)
        self._starts = _PAGE + _RANDOM_BYTES, _PAGE + _RANDOM_BYTES + self.room[0]
        self._asks = (0, 0)
        nbytes = _SLOTS * self._slot_bytes
        self._others: dict[int, Tensor] = {}
        if shares_memory(group) and group.size() > 1:
            self._memory: Tensor = shared_empty(nbytes, dtype=torch.uint8, group=group)
            own = self._memory.data_ptr()
            for rank in range(group.size()):  # it lies at one offset of every rank's heap
                address = own + (rank - group.rank()) * group.symm_mem.heap_bytes
                array = (ctypes.c_char * nbytes).from_address(address)
                self._others[rank] = torch.frombuffer(array, dtype=torch.uint8)
        else:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._others[self.rank] = self._memory
        self._bytes = memoryview(_array(self._memory))
        self._seen = {rank: memoryview(_array(memory)) for rank, memory in self._others.items()}
        self._slots = [self._memory[i * self._slot_bytes : (i + 1) * self._slot_bytes] for i in range(_SLOTS)]
        self._plans = [b""] * _SLOTS  # those that the views of each slot go by
        self._views: list[list[Tensor]] = [[] for _ in range(_SLOTS)]
        self._numbers = [-1] * _SLOTS
        self._captured: Any = None
        self._versions: list[int] = []
        self._is_late = False
        for slot in range(_SLOTS):
            _HEAD.pack_into(self._bytes, slot * self._slot_bytes, -1, *[0] * 7)
            _SMALL_HEAD.pack_into(self._bytes, slot * self._slot_bytes + _SMALL_AT, -1, *[0] * 5)
        if group.size() > 1:
            dist.barrier(group=group)  # a number that nobody wrote must not be read

    # -- what this rank writes -----------------------------------------------------------------------------------

    def prepare(self, number: int) -> None:
        """Write the slot of step `number` as this rank is now. Without room it holds nothing, and asks for more."""
        self._captured = states = self._random.capture()
        slot = number % _SLOTS
        start = slot * self._slot_bytes
        self._bytes[start : start + 8] = _NONE
        self._numbers[slot] = number
        at = start + _PAGE
        for state in states:
            self._bytes[at : at + len(state)] = state
            at += len(state)
        if at > start + _PAGE + _RANDOM_BYTES:
            raise ValueError("the random states of this process do not fit")
        buffers = self._buffers
        buffers.look()
        self._versions = buffers.versions()
        plan, begin = buffers.plan, self._starts[0]
        tensors_at = begin + _aligned(len(plan))
        if tensors_at - begin + buffers.nbytes > self.room[0]:
            self._asks = max(self._asks[0], 2 * (_aligned(len(plan)) + buffers.nbytes)), self._asks[1]
            return
        if plan is not self._plans[slot]:
            self._bytes[start + begin : start + begin + len(plan)] = plan
            self._views[slot] = buffers.views(self._slots[slot][tensors_at:])
            self._plans[slot] = plan
        buffers.save(self._views[slot])
        _HEAD.pack_into(self._bytes, start, -1, *map(len, states), len(plan), buffers.nbytes, self.room[0])
        self._bytes[start : start + 8] = number.to_bytes(8, "little", signed=True)  # last: it vouches for the rest

    def is_prepared(self, number: int) -> bool:
        """Whether this rank's slot is of that step, and since then nothing was drawn, and no buffer changed."""
        return (
            self._numbers[number % _SLOTS] == number
            and self._buffers.look()
            and self._buffers.versions() == self._versions
            and self._random.capture() == self._captured
        )

    def has_begun(self, number: int) -> bool:
        """Whether step `number` was prepared, whatever has come since."""
        return self._numbers[number % _SLOTS] == number

    def note_late(self) -> None:
        """Something was drawn, or a buffer changed, behind a backward."""
        self._is_late = True

    def write_small(self, number: int, small: Frozen) -> None:
        """Write what is small in commit `number`. Without room nothing is kept of it, and more is asked for."""
        start = number % _SLOTS * self._slot_bytes
        head, begin = start + _SMALL_AT, start + self._starts[1]
        self._bytes[head : head + 8] = _NONE
        forms = (
            pickle.dumps([(tuple(t.shape), t.dtype, str(t.device)) for t in small.tensors]) if small.tensors else b""
        )
        at = begin + _aligned(len(small.data) + len(forms))
        nbytes = sum(_aligned(t.nbytes) for t in small.tensors)
        says = _IS_LATE * self._is_late
        if at + nbytes - begin > self.room[1]:
            self._asks = self._asks[0], 2 * (at + nbytes - begin)
        if self._asks != (0, 0):
            _SMALL_HEAD.pack_into(self._bytes, head, -1, 0, *self._asks, 0, says)
            return
        self._bytes[begin : begin + len(small.data)] = small.data
        self._bytes[begin + len(small.data) : begin + len(small.data) + len(forms)] = forms
        checksum = zlib.crc32(forms, zlib.crc32(small.data))
        if small.tensors:
            views = views_of([(t.shape, t.dtype) for t in small.tensors], self._memory[at:])
            torch._foreach_copy_(views, small.tensors)
            for view, tensor in zip(views, small.tensors, strict=True):
                offset = view.data_ptr() - self._memory.data_ptr()
                checksum = zlib.crc32(self._bytes[offset : offset + tensor.nbytes], checksum)
        _SMALL_HEAD.pack_into(self._bytes, head, -1, len(small.data), len(forms), nbytes, checksum, says)
        self._bytes[head : head + 8] = number.to_bytes(8, "little", signed=True)

    # -- what the ranks read -------------------------------------------------------------------------------------

    def read_said(self, number: int) -> Said:
        """What all ranks that this one can read say of commit `number`, which they have made."""
        at = number % _SLOTS * self._slot_bytes + _SMALL_AT
        heads = [_SMALL_HEAD.unpack_from(seen, at) for seen in self._seen.values()]
        without_room = [head for head in heads if head[0] != number]
        room = tuple(max((head[i] for head in without_room), default=0) for i in (2, 3))
        sums = {head[4] for head in heads if head[0] == number}
        return Said(len(sums) > 1, any(head[5] & _IS_LATE for head in heads), (room[0], room[1]))

    def read(self, rank: int, number: int) -> Tensor | None:
        """A copy of what `rank` left of step `number`; None if it left nothing of it."""
        memory = self._others.get(rank)
        if memory is None:
            return None
        slot = memory[number % _SLOTS * self._slot_bytes :][: self._slot_bytes]
        return slot.clone() if _number_of(slot) == number else None

    # -- what this rank becomes: slots may be those of a group before this one ------------------------------------

    def restore(self, slot: Tensor, *, random: bool = True) -> None:
        """Become what a slot says; `random`: also of random numbers."""
        if random:
            restore_random(slot)
        *_, plan_bytes, _, _ = _HEAD.unpack_from(_array(slot))
        begin = _PAGE + _RANDOM_BYTES
        if plan_bytes:
            plan = slot[begin : begin + plan_bytes].numpy().tobytes()
            self._buffers.look()
            self._buffers.restore(plan, Buffers.read(plan, slot[begin + _aligned(plan_bytes) :]))


def small_of(slot: Tensor, number: int) -> Frozen | None:
    """What is small in a slot; None where its rank did not come to the end of commit `number`."""
    *_, room = _HEAD.unpack_from(_array(slot))
    found, data, forms_bytes, _, _, _ = _SMALL_HEAD.unpack_from(_array(slot), _SMALL_AT)
    if found != number:
        return None
    begin = _PAGE + _RANDOM_BYTES + room
    forms: list[Any] = []
    if forms_bytes:
        forms = pickle.loads(slot[begin + data : begin + data + forms_bytes].numpy().tobytes())
    memory = slot[begin + _aligned(data + forms_bytes) :]
    views = views_of([(torch.Size(shape), dtype) for shape, dtype, _ in forms], memory)
    tensors = [view.clone().to(device) for view, (_, _, device) in zip(views, forms, strict=True)]
    return Frozen(slot[begin : begin + data].numpy().tobytes(), tensors)


def restore_random(slot: Tensor) -> None:
    """Draw random numbers from where a slot says."""
    _, *sizes = _HEAD.unpack_from(_array(slot))
    at, states = _PAGE, []
    for size in sizes[:4]:
        states.append(slot[at : at + size].numpy().tobytes())
        at += size
    random_state.restore((states[0], states[1], states[2], states[3]))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _to_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


_NONE = (-1).to_bytes(8, "little", signed=True)


def _number_of(slot: Tensor) -> int:
    number: int = _HEAD.unpack_from(_array(slot))[0]
    return number


def _array(tensor: Tensor) -> Any:
    return tensor.numpy()
