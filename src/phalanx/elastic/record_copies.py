"""Copy each rank's records to other hosts, so that a rank can be restored after the loss of its whole host.

    rank b, host B     prepares its record of step n               before the first backward of the step
                       its next collective ──what is new in it──▶  one rank on each of the two hosts after B
    rank a, host C     before it joins that collective             has b's record of step n, in memory shared on host C

A rank that has completed step n has received a's gradients, and a sent them only after it had received b's record. So
the copy of the agreed step is complete, no matter when host B is lost. (For the record itself, on one host, see
`phalanx.elastic.records`.) Any two hosts may be lost at once; if a host is lost together with the two after it, its
records are lost.

A record holds pickles, which are loaded after a loss. So each message carries a MAC
(`phalanx._comm.transport.authentication`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx._base.deadline import Deadline
from phalanx._comm.backend.torch_integration.groups import phalanx_group, pickle_authenticator
from phalanx._comm.transport.authentication import OVERHEAD_BYTES, PickleStream

NUM_COPIES = 2
BLOCK = 256
"""The unit of copying, in bytes: a block is sent if one of its bytes is new.

A record's memory is made of such blocks.
"""
# the record's number, the number that marks it valid, the number of blocks, two spans of blocks
_HEAD = struct.Struct("qq5Q")
_HEAD_BYTES = 64
_NONE = (-1).to_bytes(8, "little", signed=True)

Span = tuple[int, int]


def plan_backups(hosts: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Return the backups of each rank, which keep copies of its records: one rank on each of the next two hosts."""
    backups: dict[int, tuple[int, ...]] = {}
    for number, ranks in enumerate(hosts):
        steps = range(1, min(NUM_COPIES, len(hosts) - 1) + 1)
        others = [hosts[(number + step) % len(hosts)] for step in steps]
        for place, rank in enumerate(ranks):
            backups[rank] = tuple(other[place % len(other)] for other in others)
    return backups


def plan_primaries(backups: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Return the primaries of each rank: the ranks whose records it keeps copies of."""
    return {rank: tuple(one for one, theirs in backups.items() if rank in theirs) for rank in backups}


def hosts_of(group: Any) -> Sequence[Sequence[int]]:
    """Return the ranks of a group by host if it spans several hosts with shared memory on each; otherwise ()."""
    ours = phalanx_group(group)
    if ours is None:
        return ()
    from phalanx._comm.transport.hierarchical.transport import (
        HierarchicalTransport,  # needs the C core, as such a group does
    )

    transport = ours.transport
    return transport.layout.topology.hosts if isinstance(transport, HierarchicalTransport) else ()


class RecordCopies:
    """`RecordCopies` sends this rank's records to its backups, and keeps its primaries' records.

    Creating it is collective. `slots` hold this rank's records, `copies` the primaries'. A record is valid only
    if it begins with its number.

    Cost: in each step one message to each of two hosts, with the blocks that differ from the previous record (random
    states that were drawn from, buffers that have changed), and one message from each primary.
    """

    def __init__(
        self, group: Any, slots: Sequence[Tensor], copies: Mapping[int, Sequence[Tensor]], backups: Sequence[int]
    ) -> None:
        ours = phalanx_group(group)
        from phalanx._comm.transport.hierarchical.transport import HierarchicalTransport

        authenticator = pickle_authenticator(group)
        assert ours is not None
        assert authenticator is not None
        assert isinstance(ours.transport, HierarchicalTransport)
        self._ours = ours
        self._authenticator = authenticator
        self._stream = PickleStream(_STREAM, group.rank())
        self._slots = slots
        self._copies = copies
        self._backups = backups
        self._latest = dict.fromkeys(copies, 0)  # by primary: the slot of its latest record
        num_blocks = slots[0].nbytes // BLOCK
        largest = OVERHEAD_BYTES + _HEAD_BYTES + num_blocks * (8 + BLOCK)
        self._messages = ours.transport.open_preceding(largest, list(copies))
        self._mirror = torch.zeros_like(slots[0])  # the backups' copy
        self._is_mirrored = torch.zeros(num_blocks, dtype=torch.bool, device="cpu").numpy()
        self._spans: list[Span] = []
        self._number = self._announced = self._sent = -1

    def announce(self, number: int, spans: Sequence[Span], *, again: bool = False) -> None:
        """Send record `number` with the next collective, unless it was announced before; `again` sends it anyway.

        The record is sent as it is at the time of that collective. `spans` are its two used ranges of bytes. All ranks
        call this between the same two collectives.
        """
        self._number, self._spans = number, [(begin // BLOCK, -(-end // BLOCK)) for begin, end in spans]
        if number != self._announced or again:
            self._announced = number
            self._ours.precede(self._exchange)

    def is_stale(self, number: int) -> bool:
        """Return whether the backups' copy of record `number` is out of date; the second span is not compared."""
        if self._sent != number or self._number != number:
            return False
        (begin, end), _ = self._spans
        return bool(self._find_new(number, (max(begin, _NUM_HEAD_BLOCKS), end)).size)

    def _exchange(self, deadline: Deadline) -> None:
        self._send(deadline)
        for primary in self._copies:
            self._receive(primary, deadline)

    def _find_new(self, number: int, span: Span) -> Any:
        begin, end = span
        mine, theirs = _blocks(self._slots[number % len(self._slots)]), _blocks(self._mirror)
        is_new = (mine[begin:end] != theirs[begin:end]).any(axis=1) | ~self._is_mirrored[begin:end]
        return is_new.nonzero()[0] + begin

    def _send(self, deadline: Deadline) -> None:
        number, spans = self._number, self._spans
        slot = self._slots[number % len(self._slots)]
        valid_number = int.from_bytes(_bytes(slot)[:8], "little", signed=True)
        news = [self._find_new(number, span) for span in spans]
        self._is_mirrored[:] = False  # a backup copies only these spans from one slot to the next
        for (begin, end), which in zip(spans, news, strict=True):
            self._is_mirrored[begin:end] = True
            _blocks(self._mirror)[which] = _blocks(slot)[which]
        _bytes(self._mirror)[:8] = _NONE
        count = sum(map(len, news))
        outbox = self._messages.outbox(deadline)
        out = outbox[OVERHEAD_BYTES:]
        _HEAD.pack_into(_bytes(out), 0, number, valid_number, count, *spans[0], *spans[1])
        numbers, blocks = _contents(out, count)
        at = 0
        for which in news:
            numbers[at : at + len(which)] = which
            blocks[at : at + len(which)] = _blocks(self._mirror)[which]
            at += len(which)
        nbytes = _HEAD_BYTES + count * (8 + BLOCK)
        signed = self._authenticator.send(_bytes(out[:nbytes]), self._stream)
        _bytes(outbox)[:OVERHEAD_BYTES] = signed[:OVERHEAD_BYTES]  # the rest is there already
        self._messages.send(self._backups, OVERHEAD_BYTES + nbytes)
        self._sent = number

    def _receive(self, primary: int, deadline: Deadline) -> None:
        received = self._messages.receive(primary, deadline)
        self._authenticator.receive(_bytes(received), PickleStream(_STREAM, primary))
        message = received[OVERHEAD_BYTES:]
        number, valid_number, count, *bounds = _HEAD.unpack_from(_bytes(message))
        numbers, blocks = _contents(message, count)
        slots, latest = self._copies[primary], self._latest[primary]
        place = number % len(slots)
        _bytes(slots[place])[:8] = _NONE
        mine, before = _blocks(slots[place]), _blocks(slots[latest])
        if place != latest:
            for begin, end in (bounds[:2], bounds[2:]):
                mine[begin:end] = before[begin:end]
            _bytes(slots[place])[:8] = _NONE
        mine[numbers] = blocks
        _bytes(slots[place])[:8] = valid_number.to_bytes(8, "little", signed=True)  # last: it marks the record valid
        self._latest[primary] = place
        self._messages.done(primary)


_NUM_HEAD_BLOCKS = 2
_STREAM = "record of an elastic step"


def _blocks(memory: Tensor) -> Any:
    return memory.numpy().view("u8").reshape(-1, BLOCK // 8)


def _contents(message: Tensor, count: int) -> tuple[Any, Any]:
    """Return the numbers of the blocks in a message, and the blocks, as views of the message."""
    begin = _HEAD_BYTES + 8 * count
    words = message.numpy()
    return words[_HEAD_BYTES:begin].view("u8"), words[begin : begin + count * BLOCK].view("u8").reshape(count, -1)


def _bytes(memory: Tensor) -> Any:
    array: Any = memory.numpy()
    return memoryview(array)
