"""A worker's connections to those of other hosts, without the workers: real sockets, on one host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

import phalanx.rpc.network as network_module
from phalanx._comm.control.key import Key
from phalanx.rpc import wire
from phalanx.rpc.network import TRANSITIONS, DealerConnection, DealerState, Network
from phalanx.rpc.wire import Frame
from phalanx.rpc.worker_info import WorkerAddress

_KEY = Key(bytes(range(32)))
_WAIT_S = 60.0


class Worker:
    """The network of a worker that answers each request with what came, and what it was told."""

    def __init__(self, number: int, key: Key = _KEY) -> None:
        me = WorkerAddress.of_self(f"w{number}", number, "host")
        self.arrived: list[bytes] = []
        self.lost: list[str] = []
        self.welcomed: set[int] = set()
        self.change = threading.Event()
        self.network = Network("127.0.0.1", key, me, self._arrive, self._lose, self._welcome)
        self.me = self.network.me = replace(me, network=self.network.address)

    def _arrive(self, connection: network_module.NetworkConnection, frame: Frame) -> None:
        self.arrived.append(bytes(frame.data))
        if frame.kind == wire.REQUEST:
            connection.send(wire.REPLY, frame.call, frame.data)
        self.change.set()

    def _lose(self, member: WorkerAddress, why: str) -> None:
        self.lost.append(why)
        self.change.set()

    def _welcome(self, member: WorkerAddress) -> None:
        self.welcomed.add(member.info.id)

    def await_change(self) -> None:
        assert self.change.wait(_WAIT_S)
        self.change.clear()


@contextlib.contextmanager
def workers(num: int) -> Iterator[list[Worker]]:
    made = [Worker(number) for number in range(num)]
    try:
        yield made
    finally:
        for one in made:
            one.network.close()


def test_many_workers_of_one_host_that_connect_at_once_are_all_accepted() -> None:
    """Of 80 that connected in the same moment the port closed some for want of room, and they gave it up as lost."""
    with workers(41) as (asked, *others):
        for number, one in enumerate(others):
            one.network.connect(asked.me).send(wire.REQUEST, number, b"%d" % number)
        for number, one in enumerate(others):
            while not one.arrived and not one.lost:
                one.await_change()
            assert (one.arrived, one.lost) == ([b"%d" % number], [])
        assert asked.welcomed == set(range(1, 41))
        assert sorted(asked.arrived) == sorted(b"%d" % number for number in range(40))


def test_the_table_in_the_docstring_is_this_one() -> None:
    drawn: dict[DealerState, set[DealerState]] = {}
    table = (network_module.__doc__ or "").split("    state  ")[1]
    for line in table.splitlines()[1:]:
        if name := line[4:16].strip():
            drawn[DealerState[name]] = {DealerState[to] for to in line[77:].split(", ") if to != "none"}
    assert drawn == TRANSITIONS


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> set[tuple[DealerState, DealerState]]:
    """The transitions of connections during a test."""
    found = set()
    become = DealerConnection._become

    def record(connection: DealerConnection, state: DealerState) -> None:
        before = connection.state
        become(connection, state)
        found.add((before, state))

    monkeypatch.setattr(DealerConnection, "_become", record)
    return found


def test_frames_sent_before_the_answer_to_the_hello_are_sent_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch, taken: set[tuple[DealerState, DealerState]]
) -> None:
    """The port rejects everybody at first, as when it has enough strangers: connections are made again and again."""
    monkeypatch.setattr(network_module, "_MAX_UNAUTHENTICATED", 0)
    closed = []
    close = network_module.ConnectionGuard._close
    read = Network._read_router

    def read_once_it_admits(network: Network) -> None:  # a hello that is read admits its connection
        if len(closed) >= 5:
            read(network)

    def count(guard: network_module.ConnectionGuard, *args: object) -> None:
        closed.append(1)
        if len(closed) == 5:
            guard._max_unauthenticated = 64
        close(guard, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(network_module.ConnectionGuard, "_close", count)
    monkeypatch.setattr(Network, "_read_router", read_once_it_admits)
    with workers(2) as (asked, asking):
        connection = asking.network.connect(asked.me)
        for number in range(20):
            connection.send(wire.REQUEST, number, b"%d" % number)
        while len(asking.arrived) < 20:
            asking.await_change()
        assert asking.arrived == asked.arrived == [b"%d" % number for number in range(20)]
        assert asking.lost == asked.lost == []
    assert len(closed) >= 5
    assert taken >= {
        (DealerState.CONNECTING, DealerState.RETRYING),
        (DealerState.RETRYING, DealerState.CONNECTING),
        (DealerState.CONNECTING, DealerState.ACCEPTED),
    }


def test_a_worker_with_another_key_gets_the_reason_after_some_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "_REFUSED_S", 0.5)
    asked, asking = Worker(0), Worker(1, Key(bytes(32)))
    asking.network.connect(asked.me)
    asking.await_change()
    assert "one of the two workers does not know the job's key" in asking.lost[0]
    assert not asked.welcomed
    for one in (asked, asking):
        one.network.close()


def test_a_port_where_nobody_listens_any_more_is_reported_at_once() -> None:
    gone, asking = Worker(0), Worker(1)
    gone.network.close()
    asking.network.connect(gone.me)
    asking.await_change()
    assert asking.lost == [f"no process accepts connections at {gone.me.network}."]
    asking.network.close()


def test_a_worker_that_ends_after_its_answer_to_the_hello_is_lost(
    taken: set[tuple[DealerState, DealerState]],
) -> None:
    with workers(1) as (asking,):
        asked = Worker(1)
        asking.network.connect(asked.me).send(wire.REQUEST, 1, b"x")
        asking.await_change()
        assert asking.arrived == [b"x"]
        asked.network.close()
        asking.await_change()
        assert asking.lost == ["its connection broke: its process has exited, or its host no longer answers."]
    assert (DealerState.ACCEPTED, DealerState.BROKEN) in taken
