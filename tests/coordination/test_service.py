"""The coordinator and its clients, over real sockets."""

import contextlib
import errno
import os
import socket
import threading

import pytest
import zmq

from phalanx._comm.control.admission import recent_peers
from phalanx._comm.control.client import Client
from phalanx._comm.control.event import Event
from phalanx._comm.control.key import Key
from phalanx._job.coordinator.service import Service
from phalanx.errors import AuthenticationError, CoordinationError, DeadlineError

KEY = Key.generate()


@contextlib.contextmanager
def service(bind="127.0.0.1:0", key=KEY, **options):
    """A service, what it said, and a way to make clients of it that are closed at the end."""
    said = []
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(Service(bind, key, log=said.append, **options))

        def connect(local=False, key=KEY, **options):
            place = running.local if local else running.address
            return stack.enter_context(Client(place, None if local else key, **options))

        yield running, connect, said


@pytest.mark.parametrize("local", [False, True])
def test_keys_values_queues_and_waits_over_the_network_and_on_the_host(local):
    with service() as (_, connect, _):
        one, other = connect(local), connect(local)
        one.set("a", "1")
        assert other.get("a") == b"1"
        assert [other.add("n", 5), one.add("n", -2)] == [5, 3]
        assert one.compare_set("c", "", "first") == b"first"
        assert other.compare_set("c", "other", "second") == b"first"
        assert other.compare_set("absent", "x", "y") == b"x"
        one.append("a", b"\x00\xff")
        assert other.get("a") == b"1\x00\xff"
        one.multi_set(["k/1", "k/2"], ["v1", b"v2"])
        assert other.multi_get(["k/2", "k/1"]) == [b"v2", b"v1"]
        assert one.list_keys("k/") == ["k/1", "k/2"]
        assert other.check(["a", "k/1"])
        assert not other.check(["a", "nothing"])
        assert one.num_keys() == 5
        assert [one.delete_key("a"), other.delete_key("a")] == [True, False]
        one.queue_push("q", "x")
        one.queue_push("q", b"y")
        assert other.queue_len("q") == 2
        assert [other.queue_pop("q"), one.queue_pop("q"), one.queue_pop("q", block=False)] == [b"x", b"y", None]
        results = []
        waiting = threading.Thread(target=lambda: results.append((other.get("late"), other.queue_pop("late queue"))))
        waiting.start()
        one.set("late", "came")
        one.queue_push("late queue", "too")
        waiting.join()
        assert results == [(b"came", b"too")]
        with pytest.raises(DeadlineError, match="wait timeout after 100ms, keys: late, never"):
            one.wait(["late", "never"], timeout=0.1)
        with pytest.raises(ValueError, match="add: the value of 'late' is not a number"):
            one.add("late", 1)


@pytest.mark.slow
def test_calls_of_many_keys_and_of_large_values_are_as_those_of_few():
    with service(None, None) as (running, _, _), Client(running.local) as client:
        keys = [f"key{n}" for n in range(70000)]
        client.multi_set(keys, [b"%d" % n for n in range(70000)])
        assert client.num_keys() == 70000
        assert client.check(keys)
        assert not client.check([*keys, "nothing"])
        client.wait(keys)
        assert client.multi_get(keys[::-1])[:2] == [b"69999", b"69998"]
        assert len(client.list_keys("key1")) == 11111
        large = [bytes([n]) * (7 << 20) for n in range(3)]
        client.multi_set(["x", "y", "z"], large)
        assert client.multi_get(["x", "y", "z", "key5"]) == [*large, b"5"]
        with pytest.raises(ValueError, match="70003 keys have this prefix: too many for one answer"):
            client.list_keys()
        assert client.delete_prefix("key") == 70000


def test_members_hear_of_each_other_in_order_and_send_messages():
    with service(None, None) as (running, _, _), contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(Client(running.local)) for _ in range(2))
        assert first.join({"host": "anna"}) == 0
        assert second.join({"host": "bert"}) == 1
        assert first.members() == {0: {"host": "anna"}, 1: {"host": "bert"}}
        (event,) = first.wait_event()
        assert (event.kind, event.member, event.facts) == ("joined", 1, {"host": "bert"})
        first.post(1, b"to you")
        first.post(-1, b"to all")
        events = []
        while len(events) < 2:
            events += second.wait_event()
        assert events == [Event("message", 0, b"to you"), Event("message", 0, b"to all")]
        second.leave("it is done")
        (event,) = first.wait_event()
        assert (event.kind, event.member, event.why) == ("left", 1, "it is done")
        with pytest.raises(ValueError, match="there is no member 1"):
            first.post(1, b"too late")
        first.leave()


@pytest.mark.slow
def test_what_a_member_does_not_take_keeps_its_senders_waiting_and_nobody_else():
    with service(None, None) as (running, _, _), contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(Client(running.local)) for _ in range(3))
        for name, client in zip(("anna", "bert", "carl"), (first, second, third), strict=True):
            client.join({"host": name}, watch=())
        sending = threading.Thread(target=lambda: [second.post(0, b"%04d" % n + bytes(1 << 20)) for n in range(40)])
        sending.start()
        with pytest.raises(DeadlineError, match="member 0 has not received its earlier messages"):  # noqa: PT012
            for _ in range(40):
                third.post(0, bytes(1 << 20), timeout=0.05)
        third.post(1, b"this one has room")
        bodies = []
        while sending.is_alive() or len([body for body in bodies if body[:4] != bytes(4)]) < 40:
            bodies += [event.body for event in first.wait_event(0.05)]
        sending.join()
        assert [body[:4] for body in bodies if body[:4] != bytes(4)] == [b"%04d" % n for n in range(40)]
        assert [event.body for event in second.wait_event()] == [b"this one has room"]
        first.leave()
        assert first.join({"host": "anna, again"}) == 3
        second.post(3, b"numbered anew")
        assert [event.body for event in first.wait_event()] == [b"numbered anew"]


def test_a_connection_that_was_gone_before_it_was_seen_is_found_in_the_kernels_table():
    """One of another key ends within a millisecond of its acceptance: the log said "an unknown address"."""
    found = []
    with contextlib.suppress(OSError):  # a machine without IPv6
        for family, place in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with _listen_where_nobody_was(family, place) as server:
                port = server.getsockname()[1]
                with socket.create_connection((place, port)) as near:
                    server.accept()[0].close()
                    assert near.recv(1) == b""
                    found.append(recent_peers(port))
    assert found in (["127.0.0.1"], ["127.0.0.1", "::1"])


def _listen_where_nobody_was(family, place):
    """Listen on a port of which the kernel remembers no connection, of another test's over IPv4 or IPv6."""
    while True:
        server = socket.create_server((place, 0), family=family)
        if not recent_peers(server.getsockname()[1]):
            return server
        server.close()


def test_without_a_key_nothing_listens_on_the_network():
    with pytest.raises(
        AuthenticationError, match=r"listen at :0: there is no key(.|\n)*Create a key once with `phalanx key`"
    ):
        Service(":0", None)
    with service(None, None) as (running, _, _):
        assert running.address is None


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_coordinator_that_cannot_bind_leaves_no_descriptor_open(scheme, monkeypatch):
    """The listener had been handed to ZeroMQ, which had not taken it yet: it stayed open, and the port taken."""
    bind = zmq.Socket.bind

    def fail(sock, address):
        if address.startswith(scheme):
            raise zmq.ZMQError(errno.EMFILE)
        return bind(sock, address)

    monkeypatch.setattr(zmq.Socket, "bind", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(zmq.ZMQError):
        Service("127.0.0.1:0", KEY)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_client_with_another_key_hears_so_and_the_coordinator_says_from_where():
    with service() as (running, connect, said):
        with pytest.raises(AuthenticationError, match=rf"at {running.address} .* does not accept this host's key"):
            connect(key=Key.generate())
        with pytest.raises(AuthenticationError, match="there is no key here"):
            connect(key=None)
        connect().set("a", "1")
    assert any("refused a connection from 127.0.0.1: it does not know the job's key" in line for line in said)


def test_an_address_where_nothing_listens_is_told_with_what_came_back():
    with service() as (running, _, _):
        place = str(running.address)
    with pytest.raises(CoordinationError, match=rf"Tried {place}: refused \(nothing listens at this port there\)"):
        Client(place, KEY)
    for name in ("no-such-host.invalid", "a..b", 64 * "a"):
        with pytest.raises(CoordinationError, match="the host name does not resolve"):
            Client(f"{name}:1", KEY)
    with pytest.raises(CoordinationError, match="there is no coordinator at /nowhere"):
        Client("/nowhere")


@pytest.mark.slow
def test_a_member_in_the_coordinators_own_process_may_be_late_on_a_machine_that_is_too_busy():
    """A first host whose heartbeats were not sent in time counted itself out, and ended its job."""
    with service(lost_after_s=1.0) as (running, connect, _):
        own, other, watching = connect(local=True), connect(local=True), connect(local=True)
        for client in (own, other):
            client.join({}, watch=())
        watching.join({})
        running.exempt(own)
        for client in (own, other):
            client._stop.set()  # its thread gets no turn
        lost = watching.wait_event(30.0)
        assert [(event.kind, event.member) for event in lost] == [("lost", other.member)]
        assert watching.wait_event(3.0) == []
        assert sorted(watching.members()) == sorted([own.member, watching.member])


def test_a_member_in_the_coordinators_own_process_is_told_when_its_thread_has_ended(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with service(lost_after_s=1.0) as (running, connect, said):
        own = connect(local=True)
        own.join({}, watch=())
        running.exempt(own)

        def fail():
            raise ZeroDivisionError

        running._unused_memory.give_back = running._send = fail
        assert [event.kind for event in own.wait_event(30.0)] == ["unreachable"]
        assert not running.is_serving
        assert "the coordinator has ended: ZeroDivisionError()" in said
