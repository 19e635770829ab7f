"""One answer for each connection: whose connection makes room, and what is not waited for."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from phalanx._comm.control import request_server
from phalanx._comm.control.address import Address, listen
from phalanx._comm.control.request_server import BACKLOG, MOST_OPEN, Answer, RequestServer

WAIT_S = 60.0


def echo(request: bytes) -> Answer | None:
    return request if request.endswith(b".") else None


@contextlib.contextmanager
def serving(answer: Callable[[bytes], Answer | None] = echo) -> Iterator[int]:
    """A server that knows a request by its full stop; yields its port."""
    listener = listen(Address("127.0.0.1", 0), BACKLOG)
    port = listener.getsockname()[1]
    server = RequestServer(listener, answer, most_bytes=100, name="test-requests")
    try:
        yield port
    finally:
        server.close()
        server.close()  # a second call does nothing
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def say(port: int, said: bytes, source: str = "127.0.0.1") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S, source_address=(source, 0))
    client.sendall(said)
    return client


def ask(port: int, said: bytes = b"a request.", source: str = "127.0.0.1") -> bytes:
    with say(port, said, source) as client:
        return read_all(client)


def read_all(client: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):  # it was closed with something unread
        while part := client.recv(1 << 16):
            received += part
    return received


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_a_request_may_come_in_parts_and_one_that_is_too_long_has_no_answer() -> None:
    with serving() as port:
        assert ask(port) == b"a request."
        with say(port, b"in ") as client:
            client.sendall(b"parts.")
            assert read_all(client) == b"in parts."
        assert ask(port, b"x" * 100) == b""
        assert ask(port, b"x" * 1000) == b""


def test_the_oldest_connections_make_room() -> None:
    with serving() as port, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(say(port, b"half")) for _ in range(3 * MOST_OPEN)]
        assert ask(port) == b"a request."
        assert sum(map(is_open, strangers)) <= MOST_OPEN
        strangers[-1].settimeout(WAIT_S)
        strangers[-1].sendall(b" and half.")
        assert read_all(strangers[-1]) == b"half and half."


def test_who_says_half_of_something_has_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_server, "_REQUEST_S", 0.1)
    monkeypatch.setattr(request_server, "_CHECK_S", 0.1)
    with serving() as port, say(port, b"half") as client:
        assert read_all(client) == b""


def test_answers_that_take_a_while_hold_up_nobody_and_are_not_waited_for_at_the_end() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def make() -> bytes:
        begun.set()
        assert go_on.wait(WAIT_S)
        return b"made"

    try:
        with (
            serving(lambda request: make if request == b"slow." else echo(request)) as port,
            contextlib.ExitStack() as s,
        ):
            slow = [s.enter_context(say(port, b"slow.")) for _ in range(3)]
            assert begun.wait(WAIT_S)
            assert ask(port) == b"a request."
            go_on.set()
            assert [read_all(client) for client in slow] == [b"made"] * 3
            begun.clear()
            go_on.clear()
            s.enter_context(say(port, b"slow."))
            assert begun.wait(WAIT_S)
    finally:
        go_on.set()


def test_without_a_free_descriptor_it_serves_whoever_comes_as_soon_as_there_is_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving() as port:
        client = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
        taken = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(client.fileno()))
            client.sendall(b"a request.")
            assert not select.select([client], [], [], 0.2)[0]
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert read_all(client) == b"a request."
        client.close()
