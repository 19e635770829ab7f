"""One member's long requests, and everybody else's turn."""

import threading
import time
import tracemalloc
from types import SimpleNamespace

import pytest
import zmq

import phalanx._job.coordinator.service as service_module
from phalanx._comm.control.client import Client
from phalanx._comm.control.wire import MAX_FIELDS, MAX_VALUE_BYTES, Op, pack, unpack
from phalanx._job.coordinator.coordinator import Coordinator
from phalanx._job.coordinator.key_value import KeyValueStore, RefusedError
from phalanx._job.coordinator.service import Service


def test_a_member_whose_requests_take_long_gets_one_of_them_before_others_are_answered(monkeypatch):
    """A round took 256 frames, however long: 10 s of LIST_KEYS over a large store, in which no heartbeat was answered.
    Followers believed the coordinator unreachable and ended their ranks."""
    passed_s = 0.0  # by requests that take 40 ms each, as the service's clock has it
    in_round, rounds = 0, []
    sent = threading.Event()
    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s))
    with Service() as service, Client(service.local) as client:
        handle, pop_outgoing = service.coordinator.handle, service.coordinator.pop_outgoing

        def slow_handle(route, frame, now):
            nonlocal passed_s, in_round
            if frame[2] == Op.LIST_KEYS:
                sent.wait()
                passed_s += 0.04
                in_round += 1
            return handle(route, frame, now)

        def take():
            nonlocal in_round
            rounds.append(in_round)
            in_round = 0
            return pop_outgoing()

        monkeypatch.setattr(service.coordinator, "handle", slow_handle)
        monkeypatch.setattr(service.coordinator, "pop_outgoing", take)
        with zmq.Context() as context, context.socket(zmq.DEALER) as flood:
            flood.linger = 0
            flood.connect(f"ipc://{service.local}")
            for n in range(1, 101):
                flood.send(pack(Op.LIST_KEYS, n, b"no key starts so"))
            sent.set()
            assert client.add("n", 1) == 1
            answered = 0
            while answered < 100:
                answered += len(unpack(flood.recv()[8:]))
    assert sum(rounds) == 100
    assert max(rounds) == 1


def test_an_append_costs_what_it_appends():
    """256 appends to a value of 8 MiB copied 2 GiB, and those that were refused did so, too."""
    store = KeyValueStore()
    store.set(b"v", bytes(MAX_VALUE_BYTES - 2))
    store.append(b"v", b"a")
    tracemalloc.start()
    try:
        store.append(b"v", b"b")
        with pytest.raises(RefusedError, match="would have 8388609 bytes"):
            store.append(b"v", b"c")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    value = store.get(b"v")
    assert type(value) is bytes
    assert len(value) == MAX_VALUE_BYTES
    assert value[-3:] == b"\0ab"
    with pytest.raises(RefusedError, match="is not a number"):
        store.add(b"v", 1)
    for key in (b"new", b"new"):
        store.append(key, b"4")
    assert store.add(b"new", 1)[0] == 45
    store.append(b"new", b"x")
    assert store.compare_set(b"new", b"45x", b"y")[0] == b"y"
    store.append(b"new", b"z")
    assert store.compare_set(b"new", b"other", b"y")[0] == b"yz"
    assert [store.delete(b"v"), store.delete(b"new")] == [True, True]
    assert store.num_bytes == 0


def test_a_frame_of_millions_of_empty_fields_is_none_of_ours():
    """It took a second to read."""
    coordinator = Coordinator()
    frame = pack(Op.CHECK, 1, *[b""] * MAX_FIELDS)
    assert coordinator.handle("member", frame, 0.0)
    assert not coordinator.handle("member", frame + pack(Op.CHECK, 2, b""), 0.0)
    assert coordinator.num_malformed == 1
