import os
import socket

import pytest

from phalanx.launch import control_protocol


@pytest.mark.parametrize("text", ["", "a", "ü" * 1000])
def test_a_message_arrives_as_it_was_sent(text: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(2):
            control_protocol.send(ours, {"text": text})
        assert control_protocol.receive(theirs) == ({"text": text}, [])
        assert control_protocol.receive(theirs) == ({"text": text}, [])


def test_descriptors_travel_and_are_not_inherited() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs:
        control_protocol.send(ours, {"n": 1}, [write])
        os.close(write)
        received = control_protocol.receive(theirs)
        assert received is not None
        message, (copy,) = received
        assert message == {"n": 1}
        assert not os.get_inheritable(copy)
        os.write(copy, b"x")
        os.close(copy)
        assert os.read(read, 2) == b"x"
        os.close(read)


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\0\0\0\x09{}"])
def test_a_peer_that_has_gone_is_the_end_even_in_the_middle_of_a_message(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(sent)
        ours.close()
        assert control_protocol.receive(theirs) is None


def test_a_channel_never_waits_and_loses_nothing() -> None:
    # Agent and zygote once waited for each other, each in a full socket.
    ours, theirs = socket.socketpair()
    channel = control_protocol.Channel(ours)
    read, write = os.pipe()
    with theirs:
        for number in range(2000):
            channel.put({"number": number, "text": "x" * 1000}, [write] if number % 100 == 0 else [])
        assert channel.waiting
        os.close(write)
        for number in range(2000):
            received = control_protocol.receive(theirs)
            channel.send_some()
            assert received is not None
            message, fds = received
            assert message["number"] == number
            assert len(fds) == (number % 100 == 0)
            for fd in fds:
                os.close(fd)
        assert not channel.waiting
        assert os.read(read, 1) == b""  # no copy was left open
        os.close(read)
        channel.close()


def test_a_channel_reads_messages_however_they_were_cut_and_the_last_of_one_that_has_gone() -> None:
    ours, theirs = socket.socketpair()
    channel = control_protocol.Channel(ours)
    assert channel.take() == []
    sender, copy = socket.socketpair()
    with sender, copy:
        control_protocol.send(sender, {"text": "ü" * 10})
        data = copy.recv(1 << 16)
    for byte in data:
        theirs.sendall(bytes([byte]))
        messages = channel.take()
    assert messages == [{"text": "ü" * 10}]
    theirs.sendall(data + data + data[:3])
    theirs.close()
    channel.put({"into": "nothing"})
    assert channel.take() == [{"text": "ü" * 10}] * 2
    assert not channel.gone
    assert channel.take() == []
    assert channel.gone
    channel.close()
