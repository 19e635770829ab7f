"""Bytes get to those who lack them, and to nobody else: by memory on a host, else as messages, in their own time."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.elastic.held import Held, value_of
from tests.seccomp import forbid, why_no_seccomp

from phalanx._comm.symmetric_memory.process_memory import read_process
from phalanx._comm.symmetric_memory.watch import ProcessId
from phalanx.elastic import tensor_transfer
from phalanx.elastic.state_transfer import transfer_state
from phalanx.elastic.tensor_transfer import TransferPeer, TransferPlan, plan_round
from phalanx.testing import run_ranks


def peer(host: str, *, namespace: str = "one", has_memory: bool = True) -> TransferPeer:
    return TransferPeer(host, ProcessId(1, 1, namespace), (0,) if has_memory else None)


def test_each_host_is_sent_the_bytes_once_and_reads_them_from_there() -> None:
    peers = {rank: peer("a" if rank < 2 else "b") for rank in range(5)}
    first = plan_round(peers, 0, {0}, {1, 2, 3, 4}, set())
    assert first == [TransferPlan(1, 0, reads=True), TransferPlan(2, 0, reads=False)]
    assert plan_round(peers, 0, {0, 1, 2}, {3, 4}, set()) == [
        TransferPlan(3, 2, reads=True),
        TransferPlan(4, 2, reads=True),
    ]


def test_who_may_not_read_or_has_no_memory_is_sent_messages() -> None:
    peers = {0: peer("a"), 1: peer("a"), 2: peer("a", namespace="two"), 3: peer("a", has_memory=False)}
    moves = plan_round(peers, 0, {0}, {1, 2, 3}, {1})
    assert moves == [
        TransferPlan(1, 0, reads=False),
        TransferPlan(2, 0, reads=False),
        TransferPlan(3, 0, reads=False),
    ]


def give(group: Any, rank: int, receivers: list[int]) -> bool:
    expected, held = value_of(1), Held(value_of(1 if rank == 0 else 2 + rank))
    transfer_state([held], 0, receivers, group)
    wanted = expected if rank in (0, *receivers) else value_of(2 + rank)
    return all(torch.equal(held.value[name], wanted[name]) for name in ("huge", "turned", "every second", "bytes"))


def test_who_receives_nothing_keeps_what_it_has() -> None:
    """With two receivers the state was broadcast over everybody: survivors' own values became another rank's."""

    def body(rank: int, world_size: int) -> None:
        assert give(dist.group.WORLD, rank, [1, 3])

    run_ranks(body, 4)


@pytest.mark.skipif(bool(why_no_seccomp()), reason=why_no_seccomp())
def test_where_no_memory_may_be_read_messages_carry_it() -> None:
    def body(rank: int, world_size: int) -> None:
        if rank == 1:
            forbid("process_vm_readv")
        assert give(dist.group.WORLD, rank, [1, 2])

    run_ranks(body, 3)


@pytest.mark.slow
def test_a_transfer_may_take_longer_than_an_operation_of_the_group() -> None:
    """A gigabyte took 16.5 s on a loaded machine: the group's timeout of 15 s ended the recovery it was part of."""

    def body(rank: int, world_size: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        group.set_timeout(timedelta(seconds=2))

        def read_slowly(*args: Any) -> None:
            time.sleep(3)
            read_process(*args)

        tensor_transfer.read_process = read_slowly  # type: ignore[attr-defined]
        tensor = torch.full((4 << 20,), float(rank))
        held = Held({"weights": tensor})
        transfer_state([held], 0, [1], group)
        assert held.value["weights"].eq(0).all()
        assert group.timeout_s == 2

    run_ranks(body, 2)
