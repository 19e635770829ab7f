"""Strangers who reach the port cost a bounded number of descriptors and bytes, and keep no member out."""

import contextlib
import multiprocessing
import os
import resource
import socket
import struct
import subprocess
import sys
import time

import pytest
import zmq

import phalanx._comm.control.connection_guard as guard_module
import phalanx._job.coordinator.service as service_module
from phalanx._comm.control.address import Address, listen
from phalanx._comm.control.admission import RateLimitedLog
from phalanx._comm.control.client import Client
from phalanx._comm.control.connection_guard import PIECE_BYTES, ConnectionGuard, _find_place, cut
from phalanx._comm.control.key import Key
from phalanx._comm.control.wire import MAX_FRAME_BYTES
from phalanx._job.coordinator.service import Service
from phalanx.errors import CoordinationError, DeadlineError

KEY = Key.generate()
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
OPEN_FILES = 1024  # the usual soft limit


def serve(pipe):
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    with Service("127.0.0.1:0", KEY) as service:
        pipe.send(service.address.port)
        while pipe.recv():
            pipe.send((len(os.listdir("/proc/self/fd")), own_bytes(), service.num_refused))


def own_bytes():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


class Served:
    """A coordinator in a process that may have `OPEN_FILES` descriptors."""

    def __init__(self, process, pipe):
        self.process, self._pipe = process, pipe
        self.port = pipe.recv()

    def ask(self):
        """How many descriptors it has, how many bytes of memory, and how many connections it has refused."""
        self._pipe.send(True)
        return self._pipe.recv()


@pytest.fixture
def served():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(theirs,))
    process.start()
    try:
        yield Served(process, ours)
    finally:
        ours.send(False)
        process.join()
        process.close()
        ours.close()
        theirs.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def come(port, said=b"\xff", host="127.0.0.1", announced=b""):
    """Connect as a stranger, say something, and stay."""
    stranger = socket.socket()
    stranger.settimeout(10.0)
    stranger.bind((host, 0))
    with contextlib.suppress(OSError):  # he may be closed by now
        stranger.connect(("127.0.0.1", port))
        stranger.sendall(said)
        stranger.setblocking(False)
        stranger.send(announced)
    return stranger


def is_open(stranger):
    stranger.setblocking(False)
    try:
        while data := stranger.recv(1 << 16):
            del data
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@pytest.mark.slow
def test_more_strangers_than_descriptors_keep_no_member_out_and_lose_none(served):
    place = f"127.0.0.1:{served.port}"
    with Client(place, KEY) as member, contextlib.ExitStack() as stack:
        number = member.join({"host": "member"})
        for n in range(OPEN_FILES + 300):
            stack.enter_context(come(served.port))
            if n % 50 == 0:
                member.set("a", str(n))
                with Client(place, KEY) as late:
                    assert late.get("a") == str(n).encode()
        num_files, _, num_refused = served.ask()
        assert num_files < OPEN_FILES - 100  # what else the process opens finds room
        assert num_refused > OPEN_FILES // 2
        time.sleep(1.0)  # for as long as it takes to say that the member is there
        assert member.members().keys() == {number}
        assert not [event for event in member.receive_events() if event.kind == "expelled"]
    with Client(place, KEY) as late:  # after they have gone
        assert late.get("a")


@pytest.mark.slow(but=("16384",))
@pytest.mark.parametrize("announced", [PIECE_BYTES, 1 << 16, MAX_FRAME_BYTES, 1 << 31])
def test_frames_that_are_half_sent_cost_little_memory(served, announced):
    _, before, _ = served.ask()
    said = GREETING + b"\x06" + struct.pack(">Q", announced)
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(come(served.port, said, announced=bytes(min(announced - 1, 4 << 20))))
        with Client(f"127.0.0.1:{served.port}", KEY) as member:
            member.set("a", "1")
        _, during, _ = served.ask()
    assert during - before < 64 << 20


def test_the_oldest_connections_of_strangers_go_first(monkeypatch):
    monkeypatch.setattr(service_module, "_MAX_UNAUTHENTICATED", 8)
    with Service("127.0.0.1:0", KEY) as service, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(come(service.address.port)) for _ in range(100)]
        while sum(map(is_open, crowd)) > 8:
            time.sleep(0.01)
        assert all(map(is_open, crowd[-8:]))


def test_where_members_have_taken_all_connections_another_waits_and_a_line_says_what_to_raise(monkeypatch):
    said = []
    monkeypatch.setattr(service_module, "connections_allowed", lambda: 3)
    with Service("127.0.0.1:0", KEY, log=said.append) as service, contextlib.ExitStack() as stack:
        place = str(service.address)
        members = [stack.enter_context(Client(place, KEY)) for _ in range(3)]
        for member in members:
            member.join({"host": "member"})
        with pytest.raises((CoordinationError, DeadlineError)), Client(place, KEY, timeout=2.0):
            pass
        assert any("3 connections are open" in line and "ulimit -Hn" in line for line in said)
        assert len(members[0].members()) == 3
        members.pop().close()
        with Client(place, KEY) as late:
            late.set("a", "1")
        assert len(members[0].members()) >= 2
        assert service.num_open <= 3


_CLOSE = """
import socket, zmq
from phalanx._comm.control.address import Address, listen
from phalanx._comm.control.admission import RateLimitedLog
from phalanx._comm.control.connection_guard import ConnectionGuard

context = zmq.Context()
router = context.socket(zmq.ROUTER)
listener = listen(Address("127.0.0.1", 0), 4096)
port = listener.getsockname()[1]
guard = ConnectionGuard(router, listener.fileno(), RateLimitedLog(print), max_unauthenticated=8, max_open=8)
router.use_fd = listener.fileno()
router.bind(f"tcp://127.0.0.1:{port}")
listener.detach()
strangers = []
while len(strangers) < 1500:  # whose coming nobody reads: more events than ZeroMQ's queue holds
    strangers.append(socket.create_connection(("127.0.0.1", port)))
    strangers[-1].send(b"x")
guard.close()
context.destroy(0)
print("closed")
"""


def test_a_flood_in_the_last_moment_does_not_hold_up_the_end():
    """ZeroMQ's thread waited for room in the queue of events, and the end of the job for that thread, for ever."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"no more than {hard} open files are allowed here")

    def allow():
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))

    line = [sys.executable, "-c", _CLOSE]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, preexec_fn=allow, check=True)
    assert done.stdout == "closed\n"


def test_a_connection_whose_message_is_read_first_is_never_unauthenticated():
    """Events and messages come in two queues: the first message was read, then the event, and a member was closed."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as member:
        member.linger = 0
        with listen(Address("127.0.0.1", 0), 10) as listener:
            port = listener.getsockname()[1]
            guard = ConnectionGuard(
                router, listener.fileno(), RateLimitedLog(lambda line: None), max_unauthenticated=0, max_open=8
            )
            router.use_fd = listener.fileno()
            router.bind(f"tcp://127.0.0.1:{port}")
            listener.detach()
        member.connect(f"tcp://127.0.0.1:{port}")
        member.send(b"hello")
        guard.admit(router.recv_multipart(copy=False)[-1])
        guard.read_events(0.0)
        guard.make_room(0.0)
        assert (guard.num_open, guard.num_unauthenticated) == (1, 0)
        with come(port) as stranger:
            while guard.num_unauthenticated == 0:
                guard.read_events(0.0)
            guard.make_room(0.0)
            assert not is_open(stranger) or guard.num_unauthenticated == 0
        assert guard.num_open == 1
        guard.close()


def test_a_value_travels_in_pieces_and_is_whole():
    value = os.urandom((8 << 20) - 5)
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(Service("127.0.0.1:0", KEY))
        first, second = (
            stack.enter_context(Client(str(service.address), KEY)),
            stack.enter_context(Client(service.local)),
        )
        first.set("far", value)
        second.set("near", value[::-1])
        assert second.get("far") == value
        assert first.get("near") == value[::-1]


@pytest.mark.parametrize("nbytes", [0, 1, 9, 10, 11, 20, 21])
def test_pieces_are_as_long_as_they_may_be(nbytes):
    part = os.urandom(nbytes)
    pieces = cut(part, 10)
    assert b"".join(pieces) == part
    assert len(pieces) == max(1, -(-nbytes // 10))
    assert max(map(len, pieces)) <= 10


def test_the_other_end_of_a_connection_is_found_as_long_as_it_is_there():
    with socket.socket(socket.AF_INET6) as listener, socket.socket(socket.AF_INET6) as client:
        try:
            listener.bind(("::1", 0))
        except OSError:
            pytest.skip("there is no IPv6 here")
        listener.listen()
        client.connect(listener.getsockname()[:2])
        assert _find_place(client.fileno()) == listener.getsockname()[:2]
        fd = client.fileno()
    assert _find_place(fd) is None


def test_a_number_that_has_become_that_of_a_socket_of_this_host_is_nobody_s_connection():
    """The coordinator ended with an IndexError: the address of such a socket is a text, and an empty one."""
    guard = ConnectionGuard.__new__(ConnectionGuard)
    guard._port = 1
    one, other = socket.socketpair()
    with one, other:
        assert _find_place(one.fileno()) is None
        guard._close(one.fileno(), ("127.0.0.1", 1))
        one.sendall(b"it is still open")
        assert other.recv(100) == b"it is still open"


def test_the_limit_of_open_files_is_raised_to_what_it_may_be():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 800:
        pytest.skip(f"no more than {hard} open files are allowed here")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
        assert guard_module.connections_allowed(0) == 300
        assert guard_module.connections_allowed(600) == 450
        raised = guard_module.connections_allowed()
        assert raised > 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raised // 3 * 4 or raised == 3 << 14
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
