"""The agent's socket reads what the same user sends, waits for no client, and keeps nothing that it should not."""

import json
import os
import socket
import struct

import pytest

from phalanx._base.ipc.agent import split
from phalanx._job.inspect.agent_socket import AgentSocket


@pytest.fixture
def agent_socket():
    opened = AgentSocket()
    yield opened
    opened.close()


def connect(agent_socket):
    sock = new_socket(agent_socket)
    assert agent_socket.read(agent_socket.fds[0]) is None
    return sock


def new_socket(agent_socket):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\0" + split(agent_socket.address)[0])
    return sock


def encode(body):
    return struct.pack("!I", len(body)) + body


def test_a_message_comes_with_its_descriptors(agent_socket):
    read, write = os.pipe()
    with connect(agent_socket) as sock:
        socket.send_fds(sock, [encode(b'{"kind": "group"}')], [read])
        heard = agent_socket.read(agent_socket.fds[1])
        assert heard.message == {"kind": "group"}
        os.write(write, b"x")
        assert os.read(heard.fds[0], 1) == b"x"
        assert not os.get_inheritable(heard.fds[0])
        heard.close()
    os.close(read)
    os.close(write)
    assert len(agent_socket.fds) == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"x" * 200_000])
def test_what_makes_no_sense_is_shown_out_and_its_descriptors_closed(agent_socket, body):
    before = len(os.listdir("/proc/self/fd"))
    read, write = os.pipe()
    with connect(agent_socket) as sock:
        if body:
            socket.send_fds(sock, [encode(body)], [read])
        else:
            sock.close()
        assert agent_socket.read(agent_socket.fds[1]) is None
    os.close(read)
    os.close(write)
    assert len(os.listdir("/proc/self/fd")) == before


def test_connections_that_send_nothing_make_room_for_others(agent_socket):
    silent = [connect(agent_socket) for _ in range(70)]
    assert len(agent_socket.fds) == 1 + 64
    assert silent[0].recv(1) == b""
    silent[-1].send(encode(b'{"kind": "snapshot"}'))
    heard = agent_socket.read(agent_socket.fds[-1])
    assert heard.message == {"kind": "snapshot"}
    heard.close()
    for sock in silent:
        sock.close()


def test_who_was_shown_out_meanwhile_is_nobody_and_who_came_in_its_place_is_heard(agent_socket):
    # The numbers that were ready are those of a moment ago.
    assert agent_socket.read(12345) is None
    with connect(agent_socket) as sock:
        fd = agent_socket.fds[1]
        assert agent_socket.read(fd) is None
        sock.send(encode(b'{"kind": "snapshot"}'))
        heard = agent_socket.read(fd)
        assert heard.message == {"kind": "snapshot"}
        heard.close()
    assert len(agent_socket.fds) == 1


def test_all_connections_are_accepted_and_none_is_closed_unread(agent_socket):
    waiting = []
    for number in range(100):
        sock = new_socket(agent_socket)
        sock.send(encode(b'{"number": %d}' % number))
        waiting.append(sock)
    heard = []
    while len(heard) < 100:
        for fd in agent_socket.fds:
            if (said := agent_socket.read(fd)) is not None:
                heard.append(said.message["number"])
                said.close()
    assert sorted(heard) == list(range(100))
    for sock in waiting:
        sock.close()


def test_who_is_not_heard_is_told_of_once_for_each_reason(agent_socket):
    for _ in range(3):
        with connect(agent_socket) as sock:
            sock.send(encode(b"garbage"))
            assert agent_socket.read(agent_socket.fds[1]) is None
        for token in (None, "", "0" * 32, 7, "\ud800", [agent_socket.token]):
            with connect(agent_socket) as sock:
                sock.send(encode(json.dumps({"kind": "elastic", "token": token}).encode()))
                heard = agent_socket.read(agent_socket.fds[1])
                assert not agent_socket.has_token(heard)
                heard.close()
        silent = [connect(agent_socket) for _ in range(65)]
        for sock in silent:
            sock.close()
        for fd in agent_socket.fds[1:]:
            assert agent_socket.read(fd) is None  # closed without a word: nothing to tell of
    mine = f"a process of user {os.getuid()} (pid {os.getpid()}) has"
    assert [notice.partition(". ")[0] for notice in agent_socket.take_notices()] == [
        f"{mine} sent an invalid message, and was refused",
        f"{mine} sent a message without the job's token, and was refused",
        f"{mine} opened a connection and sends nothing, like 64 others, and was refused",
    ]
    assert agent_socket.take_notices() == []
    with connect(agent_socket) as sock:
        sock.send(encode(json.dumps({"token": agent_socket.token}).encode()))
        heard = agent_socket.read(agent_socket.fds[1])
        assert agent_socket.has_token(heard)
        heard.close()


def test_a_message_may_come_in_pieces_while_others_are_heard(agent_socket):
    data = encode(b'{"kind": "snapshot"}')
    with connect(agent_socket) as slow, connect(agent_socket) as quick:
        slow.send(data[:7])
        slow_fd, quick_fd = agent_socket.fds[1:]
        assert agent_socket.read(slow_fd) is None
        quick.send(data)
        agent_socket.read(quick_fd).close()
        slow.send(data[7:])
        heard = agent_socket.read(slow_fd)
        assert heard.message == {"kind": "snapshot"}
        heard.close()


def test_a_closed_socket_leaves_no_address_behind():
    agent_socket = AgentSocket()
    name = agent_socket.address.partition(":")[0]
    assert name.startswith(f"phalanx-agent-{os.getpid()}-")
    agent_socket.close()
    assert agent_socket.fds == ()
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(ConnectionRefusedError):
        sock.connect("\0" + name)
