"""A rank hears of failures by one key for all its groups, and asks the store for nothing else meanwhile."""

import contextlib
import threading
import time

import pytest
from torch.distributed import HashStore, PrefixStore

from phalanx._comm.backend.coordination_store import CoordinationStore
from phalanx._comm.diagnostics.failure_report import FailureReport
from phalanx._comm.diagnostics.failure_signals import FailureSignals
from phalanx._comm.diagnostics.failure_store import FailureStore
from phalanx._comm.diagnostics.flight_recorder import RankPosition
from phalanx._comm.transport.health_monitor import HealthMonitor
from phalanx._job.coordinator.service import Service

REPORT = FailureReport("lost", (1,), {1: "pid 17 on node3"}, reason="killed")


@pytest.fixture(params=["coordinator", "hash"])
def store(request):
    if request.param == "hash":
        yield HashStore()
        return
    with Service() as service:
        made = CoordinationStore(service.local)
        yield made
        made.close()


def failure_store(store, name, signals, rank=0, size=3):
    waits = getattr(store, "wait_is_interruptible", False)
    return FailureStore(PrefixStore(name, store), name, rank, size, signals, waits_in_store=waits)


def wait_until(condition):
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def received(signals):
    found = set()
    wait_until(lambda: found.update(signals.receive()) or found)
    return found


def test_signals_are_received_once_and_by_all(store):
    sender, one, other = (FailureSignals(store) for _ in range(3))
    assert one.receive() == other.receive() == set()
    sender.send("a")
    assert received(one) == received(other) == {"a"}
    sender.send("a")
    sender.send("b")
    wait_until(lambda: store.check(["phalanx/signal/2"]))
    found = received(one)
    while found != {"a", "b"}:
        found |= received(one)
    assert one.receive() == set()
    assert FailureSignals(store).receive() == set()  # what was sent before is read from the group's own keys
    for each in (one, other):
        each.close()


def test_many_that_send_at_once_hide_no_signal(store):
    listening = FailureSignals(store)
    listening.receive()
    senders = [threading.Thread(target=FailureSignals(store).send, args=(f"group {n}",)) for n in range(20)]
    for sender in senders:
        sender.start()
    heard = set()
    wait_until(lambda: heard.update(listening.receive()) or len(heard) == 20)
    for sender in senders:
        sender.join()
    listening.close()


def test_a_group_hears_of_its_failure_and_others_do_not(store):
    signals = FailureSignals(store)
    told = {"a": [], "b": []}
    monitors = [
        HealthMonitor(failure_store(store, name, signals), lambda: RankPosition(0), lambda: False, told[name].append)
        for name in told
    ]
    assert sum(thread.name == "phalanx-health-monitor" for thread in threading.enumerate()) == 1
    failure_store(store, "b", FailureSignals(store), rank=2).post(REPORT)
    wait_until(lambda: told["b"])
    assert told == {"a": [], "b": [REPORT]}
    for monitor in monitors:
        monitor.close()
    assert not any(thread.name == "phalanx-health-monitor" for thread in threading.enumerate())


def test_a_failure_that_was_posted_before_is_heard(store):
    failure_store(store, "a", FailureSignals(store), rank=1).post(REPORT)
    told = []
    monitor = HealthMonitor(
        failure_store(store, "a", FailureSignals(store)), lambda: RankPosition(0), lambda: False, told.append
    )
    wait_until(lambda: told)
    assert told == [REPORT]
    monitor.close()


def test_the_first_that_asks_collects_where_all_are_and_the_others_take_its_report(store):
    positions = {rank: RankPosition(rank + 1) for rank in range(1, 5)}
    monitors = [
        HealthMonitor(
            failure_store(store, "a", FailureSignals(store), rank, 6),
            lambda rank=rank: positions[rank],
            lambda: False,
            lambda report: None,
        )
        for rank in positions
    ]
    first, second = (failure_store(store, "a", FailureSignals(store), rank, 6) for rank in (0, 5))
    found = {}
    threads = []

    def ask(name, one):
        found[name] = one.collect_positions()
        one.post(REPORT)

    store.compare_set("a/positions/a", "", "0")  # as the first does
    first_asks = threading.Thread(target=ask, args=("first", first))
    second_asks = threading.Thread(target=ask, args=("second", second))
    for thread in (first_asks, second_asks):
        thread.start()
        threads.append(thread)
        wait_until(lambda: store.check(["a/positions/a"]))
    for thread in threads:
        thread.join()
    assert found["first"] == positions
    for monitor in monitors:
        monitor.close()


def test_who_hears_nothing_asks_for_nothing():
    with contextlib.ExitStack() as open_things:
        service = open_things.enter_context(Service())
        store = open_things.enter_context(contextlib.closing(CoordinationStore(service.local)))
        asked = []
        handle = service.coordinator._handle
        signals = FailureSignals(store)
        monitors = [
            HealthMonitor(
                failure_store(store, name, signals), lambda: RankPosition(0), lambda: False, lambda report: None
            )
            for name in "abcdefgh"
        ]
        for monitor in monitors:
            open_things.callback(monitor.close)
        wait_until(lambda: all(monitor._has_checked for monitor in monitors) and signals._waiting is not None)
        service.coordinator._handle = lambda session, message: asked.append(message.what) or handle(session, message)
        rounds, receive = [], signals.receive
        signals.receive = lambda: rounds.append(1) or receive()
        wait_until(lambda: len(rounds) > 5)  # of the listener: it asked 80 times in them
        assert asked == []
