"""The agent's door hears whoever is the same user, waits for nobody, and keeps nothing that it should not."""

import os
import socket

import pytest

from phalanx.launch.agent.agent_socket import Door


@pytest.fixture
def door():
    opened = Door()
    yield opened
    opened.close()


def visit(door):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect("\0" + door.address.partition(":")[0])
    assert door.read(door.fds[0]) is None
    return sock


def test_a_visitor_is_heard_with_what_it_brings(door):
    read, write = os.pipe()
    with visit(door) as sock:
        socket.send_fds(sock, [b'{"kind": "group"}'], [read])
        heard = door.read(door.fds[1])
        assert heard.message == {"kind": "group"}
        os.write(write, b"x")
        assert os.read(heard.fds[0], 1) == b"x"
        assert not os.get_inheritable(heard.fds[0])
        heard.close()
    os.close(read)
    os.close(write)
    assert len(door.fds) == 1


@pytest.mark.parametrize("packet", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"x" * 200_000])
def test_what_makes_no_sense_is_shown_out_and_its_descriptors_closed(door, packet):
    before = len(os.listdir("/proc/self/fd"))
    read, write = os.pipe()
    with visit(door) as sock:
        if packet:
            socket.send_fds(sock, [packet], [read])
        else:
            sock.close()
        assert door.read(door.fds[1]) is None
    os.close(read)
    os.close(write)
    assert len(os.listdir("/proc/self/fd")) == before


def test_visitors_that_say_nothing_make_room_for_others(door):
    silent = [visit(door) for _ in range(70)]
    assert len(door.fds) == 1 + 64
    assert silent[0].recv(1) == b""
    silent[-1].send(b'{"kind": "look"}')
    heard = door.read(door.fds[-1])
    assert heard.message == {"kind": "look"}
    heard.close()
    for sock in silent:
        sock.close()


def test_who_was_shown_out_meanwhile_is_nobody_and_who_came_in_its_place_is_heard(door):
    # The numbers that were ready are those of a moment ago.
    assert door.read(12345) is None
    with visit(door) as sock:
        fd = door.fds[1]
        assert door.read(fd) is None
        sock.send(b'{"kind": "look"}')
        heard = door.read(fd)
        assert heard.message == {"kind": "look"}
        heard.close()
    assert len(door.fds) == 1


def test_all_who_wait_are_let_in_but_none_is_shown_out_unheard(door):
    waiting = []
    for number in range(100):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect("\0" + door.address.partition(":")[0])
        sock.send(b'{"number": %d}' % number)
        waiting.append(sock)
    heard = []
    while len(heard) < 100:
        for fd in door.fds:
            if (said := door.read(fd)) is not None:
                heard.append(said.message["number"])
                said.close()
    assert sorted(heard) == list(range(100))
    for sock in waiting:
        sock.close()


def test_a_shut_door_has_no_address_left_behind():
    door = Door()
    name = door.address.partition(":")[0]
    assert name.startswith(f"phalanx-agent-{os.getpid()}-")
    door.close()
    assert door.fds == ()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, pytest.raises(ConnectionRefusedError):
        sock.connect("\0" + name)
