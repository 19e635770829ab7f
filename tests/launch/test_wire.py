import os
import socket

import pytest

from phalanx.launch import wire


@pytest.mark.parametrize("text", ["", "a", "ü" * 1000])
def test_a_message_arrives_as_it_was_sent(text: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(2):
            wire.send(ours, {"text": text})
        assert wire.receive(theirs) == ({"text": text}, [])
        assert wire.receive(theirs) == ({"text": text}, [])


def test_descriptors_travel_and_are_not_inherited() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs:
        wire.send(ours, {"n": 1}, [write])
        os.close(write)
        received = wire.receive(theirs)
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
        assert wire.receive(theirs) is None
