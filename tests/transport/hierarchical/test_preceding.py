"""Messages that precede a collective: whoever has completed it knows that they have arrived."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts

from phalanx._base.deadline import Deadline
from phalanx._comm.backend.torch_integration.groups import phalanx_group
from phalanx.errors import PeerLostError
from phalanx.testing import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

_STEPS = 7  # more than receives are posted, and than outboxes there are
_COLLECTIVES: tuple[Callable[[], object], ...] = (
    lambda: dist.all_reduce(torch.ones(5)),
    lambda: dist.all_reduce(torch.ones(200_000)),
    dist.barrier,
    lambda: dist.all_gather_object([None] * dist.get_world_size(), "a word"),
    lambda: dist.broadcast(torch.ones(3), 1),
    lambda: dist.all_reduce(torch.ones(5), async_op=True).wait(),
    lambda: dist.all_to_all_single(torch.empty(3), torch.ones(3)),
)


class Exchange:
    """Sends a message to the next host and takes one from the host before, in the collective that comes."""

    def __init__(self, rank: int, world_size: int) -> None:
        group = phalanx_group(dist.group.WORLD)
        assert group is not None
        self.group, self.rank = group, rank
        self.to, self.source = (rank + 1) % world_size, (rank - 1) % world_size
        transport: Any = group.transport
        self.messages = transport.open_preceding(4096, [self.source])
        self.came: list[bytes] = []

    def send(self, word: bytes) -> None:
        """Have `word` sent in the next collective."""

        def action(deadline: Deadline) -> None:
            box = self.messages.outbox(deadline)
            memoryview(box.numpy())[: len(word)] = word
            self.messages.send([self.to], len(word))
            self.came.append(bytes(self.messages.receive(self.source, deadline).numpy()))
            self.messages.done(self.source)

        self.group.precede(action)


def _exchange(rank: int, world_size: int, _machines: Any) -> list[int]:
    exchange = Exchange(rank, world_size)
    counts = []
    for step, collective in zip(range(_STEPS), _COLLECTIVES, strict=True):
        exchange.send(b"%d of %d" % (step, rank) * (step + 1))
        counts.append(len(exchange.came))
        collective()
        counts.append(len(exchange.came))
        dist.all_reduce(torch.ones(1))  # in which nothing is sent
    assert exchange.came == [b"%d of %d" % (step, exchange.source) * (step + 1) for step in range(_STEPS)]
    return counts


def test_a_message_has_arrived_when_the_next_collective_of_any_kind_is_over() -> None:
    expected = [count for step in range(_STEPS) for count in (step, step + 1)]
    assert on_hosts((1, 1, 1), _exchange) == [expected] * 3


def _lose_one(rank: int, world_size: int, _machines: Any) -> tuple[int, ...]:
    exchange = Exchange(rank, world_size)
    exchange.send(b"first")
    dist.barrier()
    exchange.send(b"second")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as lost:
        dist.all_reduce(torch.ones(5))
    return tuple(lost.value.ranks)


def test_where_the_sender_dies_the_collective_fails_and_names_it() -> None:
    first, second, _ = on_hosts((1, 1, 1), _lose_one, lost=(2,))
    assert first == second == (2,)


def _forget(rank: int, world_size: int, _machines: Any) -> bool:
    """Where no collective comes, nothing waits for the messages as the group is left."""
    exchange = Exchange(rank, world_size)
    exchange.send(b"never")
    return exchange.came == []


def test_a_group_ends_although_a_message_was_to_be_sent_in_a_collective_that_never_came() -> None:
    assert on_hosts((1, 1), _forget) == [True, True]
