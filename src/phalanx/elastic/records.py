"""Record each rank's own state at a step in one of its three slots, which the other ranks of its host can read.

    forward of step n
    its backward begins        slot n%3: number -1; random states and buffers; number n          prepared
    gradients, update          ...                   (a rank with all gradients of step n knows that all have prepared)
    commit of step n           slot n%3, separately: small state (values, extra states); its checksum; number n
                               ranks wait for each other: in the first commits, and if their small states differ, they
                               draw random numbers or change buffers after a backward, or need more room

The slots of a dead rank stay in memory that the other ranks have mapped. A rank that has completed step n has received
every rank's gradients, and each rank sent them only after it had prepared. So the slot of the agreed step is complete,
no matter when its rank died. The small state is in the slot if ranks waited for each other in that commit; otherwise a
survivor has an identical one.

With three slots, a rank can begin step n+1 while another rank, in the commit of step n, still reads slots of step n-1.

On several hosts the slots of a rank are copied to two other hosts (`phalanx.elastic.record_copies`), which have them
before any rank can complete the step.

A slot describes its own layout, so the buffers may change form in the next step. A survivor rolls back to its own slot
of the agreed step.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx._comm.backend.shared import host_memory, shares_memory
from phalanx._comm.transport.tensors import copy_all
from phalanx.elastic import generator_states
from phalanx.elastic.buffers import Buffers, room_for, views_of
from phalanx.elastic.frozen import Frozen
from phalanx.elastic.generator_states import GeneratorStates
from phalanx.elastic.record_copies import RecordCopies, hosts_of, plan_backups, plan_primaries

_HEAD = struct.Struct("q7Q")  # the number; sizes of four random states, the buffers' plan, the buffers and their room
# The number; sizes of data, forms, tensors; whether they are in the slot; the checksum; whether late; requested room.
_SMALL_HEAD = struct.Struct("q8Q")
_SMALL_AT = 128
_ANSWERS, _ANSWERS_AT = struct.Struct("4Q"), _SMALL_AT + 40  # the last four numbers of `_SMALL_HEAD`
_LACK = struct.Struct("qQ")  # the number, and whether its record had no room when the backward began
_LACK_AT = 256
_RANDOM_BYTES = 16384  # torch: 5056 bytes, Python: 3.7 KiB, NumPy: 2.7 KiB; the rest is for CUDA
_PAGE = 4096
_RANDOM_AT = 512
_BEGIN = _RANDOM_AT + _RANDOM_BYTES
_SPARE = 1 << 18
_SLOTS = 3


class CommitAnswers(NamedTuple):
    """`CommitAnswers` combines the answers of all ranks in a commit.

    They tell whether the small states differ, whether a rank draws random numbers or changes buffers after a backward,
    and how much room is requested.
    """

    differ: bool
    are_late: bool
    room: tuple[int, int]


class _Slot:
    """A `_Slot` is the memory for the record of one step of one rank."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.bytes = memoryview(_array(memory))
        self.plan = b""  # the plan by which `views` are laid out
        self.views: list[Tensor] = []
        self.small: Frozen | None = None  # the small state that was written last, if it had no tensors
        self.answers: tuple[int, ...] = ()  # the answers that were written with the small state


class RankRecords:
    """`RankRecords` keeps the slots of this host's ranks, and copies from other hosts. Creating it is collective.

    `room` is the number of bytes for buffers and for the small state, the same on all ranks, and 0 if still unknown. A
    rank that needs more than half of it requests more; a record that does not fit stays in this rank's private memory.
    Records of ranks that train `apart` are not copied to other hosts.
    """

    def __init__(
        self,
        group: Any,
        layers: Mapping[str, nn.Module],
        random: GeneratorStates,
        room: tuple[int, int] = (0, 0),
        *,
        apart: bool = False,
    ) -> None:
        self._group, self._random = group, random
        self._buffers = Buffers(layers)
        self._buffers.refresh()
        self.rank, self.size = group.rank(), group.size()
        self._is_shared = self.size > 1 and shares_memory(group)
        mine = 2 * (self._buffers.nbytes + len(self._buffers.plan)), 0
        wanted: list[Any] = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(wanted, mine, group=group)
        self.room = tuple(_to_pages(max(room[i], *(one[i] for one in wanted)) + _SPARE) for i in range(2))
        slot_bytes = _BEGIN + sum(self.room)
        backups = plan_backups(hosts_of(group)) if not apart else {}
        primaries = plan_primaries(backups)
        most = max(map(len, primaries.values()), default=0)
        pieces = host_memory((1 + most) * _SLOTS * slot_bytes, group)
        self._others: dict[int, list[Tensor]] = {}  # by rank: the slots of this host's ranks and of their primaries
        for rank, memory in pieces.items():
            for number, owner in enumerate((rank, *primaries.get(rank, ()))):
                slots = memory[number * _SLOTS * slot_bytes :]
                self._others[owner] = [slots[i * slot_bytes : (i + 1) * slot_bytes] for i in range(_SLOTS)]
        self._mapped = {rank: [memoryview(_array(slot)) for slot in self._others[rank]] for rank in pieces}
        self._slots = [_Slot(memory) for memory in self._others[self.rank]]
        self._private: dict[int, Tensor] = {}  # by step number: records for which there was no room
        self._smalls: dict[int, Frozen] = {}  # the small states of the latest commits
        self._numbers = [-1] * _SLOTS
        self._captured: Any = None
        self._versions: list[int] = []
        self._requests = [0, 0]
        self.is_late = False
        """Whether random numbers were drawn, or a buffer changed, after a backward."""
        for owner in (self.rank, *primaries.get(self.rank, ())):
            for empty in self._others[owner]:
                fresh = memoryview(_array(empty))
                _HEAD.pack_into(fresh, 0, -1, *[0] * 7)
                _SMALL_HEAD.pack_into(fresh, _SMALL_AT, -1, *[0] * 8)
                _LACK.pack_into(fresh, _LACK_AT, -1, 0)
        self._copies: RecordCopies | None = None
        if backups:
            held_copies = {primary: self._others[primary] for primary in primaries[self.rank]}
            self._copies = RecordCopies(group, self._others[self.rank], held_copies, backups[self.rank])
        if self.size > 1:
            dist.barrier(group=group)  # no rank may read a number before its owner has initialized it

    # -- writing --------------------------------------------------------------------------------------------------

    def prepare(self, number: int) -> None:
        """Write this rank's current random states and buffers into the slot of step `number`."""
        self._captured = states = self._random.capture()
        if sum(map(len, states)) > _RANDOM_BYTES:
            raise ValueError("the random states of this process do not fit")
        slot = self._slots[number % _SLOTS]
        slot.bytes[:8] = _NONE
        buffers = self._buffers
        buffers.refresh()
        self._versions = buffers.versions()
        room, needed = self.room[0], _aligned(len(buffers.plan)) + buffers.nbytes
        self._request_room(0, needed)
        if self._numbers[number % _SLOTS] != number:  # once per step: other ranks read it at any time in their commits
            self._numbers[number % _SLOTS] = number
            _LACK.pack_into(slot.bytes, _LACK_AT, number, needed > room)
        if needed > room:
            slot, room = _Slot(torch.empty(_BEGIN + needed, dtype=torch.uint8, device="cpu")), needed
            _SMALL_HEAD.pack_into(slot.bytes, _SMALL_AT, -1, *[0] * 8)
            self._private = {one: memory for one, memory in self._private.items() if one > number - _SLOTS}
            self._private[number] = slot.memory
        else:
            self._private.pop(number, None)
        at = _RANDOM_AT
        for state in states:
            slot.bytes[at : at + len(state)] = state
            at += len(state)
        plan = buffers.plan
        if plan is not slot.plan:
            slot.bytes[_BEGIN : _BEGIN + len(plan)] = plan
            slot.views = buffers.views(slot.memory[_BEGIN + _aligned(len(plan)) :])
            slot.plan = plan
        buffers.save(slot.views)
        _HEAD.pack_into(slot.bytes, 0, -1, *map(len, states), len(plan), buffers.nbytes, room)
        slot.bytes[:8] = number.to_bytes(8, "little", signed=True)  # last: it marks the rest as valid
        self._announce(number)

    def _announce(self, number: int, *, again: bool = False) -> None:
        """Have the record of step `number` sent to the other hosts with the next collective."""
        if self._copies is None:
            return
        slot, begin = self._slots[number % _SLOTS], _BEGIN + self.room[0]
        *_, plan_bytes, nbytes, _ = _HEAD.unpack_from(slot.bytes)
        is_here = slot.bytes[:8] != _NONE
        used = _BEGIN + _aligned(plan_bytes) + nbytes if is_here else _RANDOM_AT
        small, data, forms, tensors, is_there, *_ = _SMALL_HEAD.unpack_from(slot.bytes, _SMALL_AT)
        small_bytes = _aligned(data + forms) + tensors if small == number and is_there else 0
        self._copies.announce(number, [(0, used), (begin, begin + small_bytes)], again=again)

    def is_copied(self, number: int) -> bool:
        """Return whether other hosts' copies of this rank's record of step `number`, if there are any, are current."""
        return self._copies is None or not self._copies.is_stale(number)

    def is_prepared(self, number: int) -> bool:
        """Return whether step `number` was prepared, and no random number was drawn or buffer changed since."""
        return (
            self._numbers[number % _SLOTS] == number
            and self._buffers.refresh()
            and self._buffers.versions() == self._versions
            and self._random.capture() == self._captured
        )

    def has_begun(self, number: int) -> bool:
        """Return whether step `number` was prepared, even if the state has changed since."""
        return self._numbers[number % _SLOTS] == number

    def write_small(self, number: int, small: Frozen) -> None:
        """Write the small state of commit `number`; if it does not fit, keep it in this process, and request room."""
        slot = self._slots[number % _SLOTS]
        self._smalls[number] = small
        self._smalls.pop(number - _SLOTS, None)
        if small is slot.small and slot.answers == (self.is_late, *self._requests):  # only the number differs
            slot.bytes[_SMALL_AT : _SMALL_AT + 8] = number.to_bytes(8, "little", signed=True)
            self._announce(number)
            return
        slot.bytes[_SMALL_AT : _SMALL_AT + 8] = _NONE
        slot.small = None
        data, forms = small.data, b""
        if not small.tensors and 2 * len(data) <= self.room[1]:
            begin = _BEGIN + self.room[0]
            slot.bytes[begin : begin + len(data)] = data
            slot.small, slot.answers = small, (self.is_late, *self._requests)
            _SMALL_HEAD.pack_into(slot.bytes, _SMALL_AT, -1, len(data), 0, 0, True, zlib.crc32(data), *slot.answers)
            slot.bytes[_SMALL_AT : _SMALL_AT + 8] = number.to_bytes(8, "little", signed=True)
            self._announce(number)
            return
        if small.tensors:
            forms = pickle.dumps([(tuple(t.shape), t.dtype, str(t.device)) for t in small.tensors])
        start = _aligned(len(data) + len(forms))
        nbytes = room_for(small.tensors)
        self._request_room(1, start + nbytes)
        memory, content, begin = slot.memory, slot.bytes, _BEGIN + self.room[0]
        if start + nbytes > self.room[1]:
            memory, begin = torch.empty(start + nbytes, dtype=torch.uint8, device="cpu"), 0
            content = memoryview(_array(memory))
        content[begin : begin + len(data)] = data
        content[begin + len(data) : begin + len(data) + len(forms)] = forms
        checksum = zlib.crc32(forms, zlib.crc32(data))
        if small.tensors:
            views = views_of([(t.shape, t.dtype) for t in small.tensors], memory[begin + start :])
            copy_all(views, small.tensors)
            for view, tensor in zip(views, small.tensors, strict=True):
                offset = view.data_ptr() - memory.data_ptr()
                checksum = zlib.crc32(content[offset : offset + tensor.nbytes], checksum)
        answers = checksum, self.is_late, *self._requests
        is_there = memory is slot.memory
        _SMALL_HEAD.pack_into(slot.bytes, _SMALL_AT, -1, len(data), len(forms), nbytes, is_there, *answers)
        slot.bytes[_SMALL_AT : _SMALL_AT + 8] = number.to_bytes(8, "little", signed=True)
        self._announce(number)

    def _request_room(self, kind: int, needed: int) -> None:
        if 2 * needed > self.room[kind] and self.size > 1:
            self._requests[kind] = max(self._requests[kind], 2 * needed)

    @property
    def readable(self) -> tuple[int, ...]:
        """Return the ranks whose slots or copies this rank can read: its host's ranks, and its primaries."""
        return tuple(self._others)

    # -- reading --------------------------------------------------------------------------------------------------

    def gather_answers(self, number: int) -> CommitAnswers:
        """Wait until all ranks have written the small state of commit `number`; return their answers. Collective."""
        if self._is_shared:
            dist.barrier(group=self._group)
            return _summarize(
                [_SMALL_HEAD.unpack_from(slots[number % _SLOTS], _SMALL_AT) for slots in self._mapped.values()]
            )
        self._announce(number, again=True)
        gathered: list[Any] = [None] * self.size
        mine = _SMALL_HEAD.unpack_from(self._slots[number % _SLOTS].bytes, _SMALL_AT)
        dist.all_gather_object(gathered, mine, group=self._group)
        return _summarize(gathered)

    def may_skip_wait(self, number: int) -> bool:
        """Return whether the ranks can skip the wait for each other in commit `number`; the same on all ranks.

        They can if, in the previous commit, all small states were equal and no rank was late or requested room, and if
        no rank lacked room when it began step `number`; all ranks have begun it. Without shared memory, as on several
        hosts, the answers of other ranks cannot be read, and this is always True.
        """
        if not self._is_shared:
            return True
        last, now = (number - 1) % _SLOTS, number % _SLOTS
        mine, lacks = _ANSWERS.unpack_from(self._mapped[self.rank][last], _ANSWERS_AT), (number, True)
        if mine[1:] != _NOTHING:
            return False
        for slots in self._mapped.values():
            if (
                _ANSWERS.unpack_from(slots[last], _ANSWERS_AT) != mine
                or _LACK.unpack_from(slots[now], _LACK_AT) == lacks
            ):
                return False
        return True

    def read(self, rank: int, number: int) -> Tensor | None:
        """Return a copy of the record of `rank` for step `number`; None if there is none."""
        if rank == self.rank and number in self._private:
            return self._private[number].clone()
        slots = self._others.get(rank)
        if slots is None:
            return None
        slot = slots[number % _SLOTS]
        return slot.clone() if _number_of(slot) == number else None

    def own_small(self, number: int) -> Frozen | None:
        """Return this rank's small state of commit `number`; None if the rank has not reached it."""
        return self._smalls.get(number)

    # -- restoring: slots may belong to an earlier group ----------------------------------------------------------

    def restore(self, slot: Tensor, *, random: bool = True) -> None:
        """Restore the buffers from a slot and, with `random`, the random states."""
        if random:
            restore_random(slot)
        *_, plan_bytes, _, _ = _HEAD.unpack_from(_array(slot))
        if plan_bytes:
            plan = slot[_BEGIN : _BEGIN + plan_bytes].numpy().tobytes()
            self._buffers.refresh()
            self._buffers.restore(plan, Buffers.read(plan, slot[_BEGIN + _aligned(plan_bytes) :]))


def _summarize(heads: Sequence[tuple[int, ...]]) -> CommitAnswers:
    checksums, late, *requested = zip(*(head[5:] for head in heads), strict=True)
    return CommitAnswers(len(set(checksums)) > 1, any(late), (max(requested[0]), max(requested[1])))


def small_of(slot: Tensor, number: int) -> Frozen | None:
    """Return the small state in a slot; None if its rank did not reach commit `number`, or had no room for it."""
    *_, room = _HEAD.unpack_from(_array(slot))
    found, data, forms_bytes, _, is_there, *_ = _SMALL_HEAD.unpack_from(_array(slot), _SMALL_AT)
    if found != number or not is_there:
        return None
    begin = _BEGIN + room
    forms: list[Any] = []
    if forms_bytes:
        forms = pickle.loads(slot[begin + data : begin + data + forms_bytes].numpy().tobytes())
    memory = slot[begin + _aligned(data + forms_bytes) :]
    views = views_of([(torch.Size(shape), dtype) for shape, dtype, _ in forms], memory)
    tensors = [view.clone().to(device) for view, (_, _, device) in zip(views, forms, strict=True)]
    return Frozen(slot[begin : begin + data].numpy().tobytes(), tensors)


def restore_random(slot: Tensor) -> None:
    """Restore the random states from a slot."""
    _, *sizes = _HEAD.unpack_from(_array(slot))
    at, states = _RANDOM_AT, []
    for size in sizes[:4]:
        states.append(slot[at : at + size].numpy().tobytes())
        at += size
    generator_states.restore((states[0], states[1], states[2], states[3]))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _to_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


_NONE = (-1).to_bytes(8, "little", signed=True)
_NOTHING = (0, 0, 0)


def _number_of(slot: Tensor) -> int:
    number: int = _HEAD.unpack_from(_array(slot))[0]
    return number


def _array(tensor: Tensor) -> Any:
    return tensor.numpy()
