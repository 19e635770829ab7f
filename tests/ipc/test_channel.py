"""Messages between processes of a host arrive whole, with their descriptors, and nobody waits who must not."""

import contextlib
import errno
import json
import os
import random
import socket
import struct
import threading

import pytest

from phalanx._base.deadline import Deadline
from phalanx._base.ipc.channel import Channel


@pytest.fixture
def ends():
    sockets = socket.socketpair()
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Channel(sock))) for sock in sockets]


def encode(content):
    body = json.dumps(content).encode()
    return struct.pack("!I", len(body)) + body


def open_fds():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("text", ["", "a", "ü" * 1000])
def test_a_message_arrives_as_it_was_sent(ends, text):
    ours, theirs = ends
    for _ in range(2):
        ours.send({"text": text})
    assert [message.content for message in theirs.receive_available()] == [{"text": text}] * 2
    assert theirs.receive_available() == []


def test_descriptors_travel_and_are_not_inherited(ends):
    ours, theirs = ends
    read, write = os.pipe()
    ours.send({"n": 1}, [write])
    os.close(write)
    (message,) = theirs.receive_available()
    assert message.content == {"n": 1}
    assert not os.get_inheritable(message.fds[0])
    os.write(message.fds[0], b"x")
    message.close()
    assert os.read(read, 2) == b"x"
    os.close(read)


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\0\0\0\x09{}"])
def test_a_peer_that_has_gone_is_the_end_even_in_the_middle_of_a_message(sent):
    ours, theirs = socket.socketpair()
    with contextlib.closing(Channel(theirs)) as channel:
        ours.sendall(sent)
        ours.close()
        assert channel.receive() is None
        assert channel.gone
        assert channel.is_garbled == bool(sent)


def test_a_channel_never_waits_and_loses_nothing(ends):
    """Agent and zygote once waited for each other, each in a full socket."""
    ours, theirs = ends
    read, write = os.pipe()
    for number in range(2000):
        ours.put({"number": number, "text": "x" * 1000}, [write] if number % 100 == 0 else [])
    assert ours.waiting
    os.close(write)
    for number in range(2000):
        (message,) = theirs.receive_available(limit=1)
        ours.send_some()
        assert message.content["number"] == number
        assert len(message.fds) == (number % 100 == 0)
        message.close()
    assert not ours.waiting
    assert os.read(read, 1) == b""  # no copy was left open
    os.close(read)


def test_messages_are_read_however_they_were_cut_and_the_last_of_one_that_has_gone():
    ours, theirs = socket.socketpair()
    with contextlib.closing(Channel(ours)) as channel:
        assert channel.receive_available() == []
        data = encode({"text": "ü" * 10})
        for byte in data:
            theirs.sendall(bytes([byte]))
            messages = channel.receive_available()
        assert [message.content for message in messages] == [{"text": "ü" * 10}]
        theirs.sendall(data + data + data[:3])
        theirs.close()
        channel.put({"into": "nothing"})
        assert channel.broken
        assert [message.content for message in channel.receive_available()] == [{"text": "ü" * 10}] * 2
        assert channel.gone


def test_send_waits_until_there_is_room_and_raises_where_the_other_has_gone(ends):
    ours, theirs = ends
    received = []
    reader = threading.Thread(target=lambda: received.append(theirs.receive(Deadline.after(60))))
    reader.start()
    ours.send({"text": "x" * (1 << 24)})
    reader.join()
    assert len(received[0].content["text"]) == 1 << 24
    theirs.close()
    with pytest.raises(BrokenPipeError):
        ours.send({"text": "x"})


def test_receive_waits_until_its_deadline(ends):
    with pytest.raises(TimeoutError):
        ends[0].receive(Deadline.after(0.01))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"7"])
def test_what_is_no_message_is_passed_over_and_its_descriptors_are_closed(body):
    ours, theirs = socket.socketpair()
    with ours, contextlib.closing(Channel(theirs)) as channel:
        before = open_fds()
        socket.send_fds(ours, [struct.pack("!I", len(body)) + body], [0, 1])
        ours.sendall(encode({"n": 1}))
        assert [message.content for message in channel.receive_available()] == [{"n": 1}]
        assert channel.is_garbled
        assert open_fds() == before


def test_more_bytes_or_descriptors_than_a_message_may_have_end_the_channel():
    for data, fds in ((struct.pack("!I", 101), []), (encode({}), [0, 1, 2])):
        ours, theirs = socket.socketpair()
        with ours, contextlib.closing(Channel(theirs, max_bytes=100, max_fds=2)) as channel:
            before = open_fds()
            for byte in data:  # the system itself cuts off those that come with one byte
                socket.send_fds(ours, [bytes([byte])], fds)
            assert channel.receive_available() == []
            assert channel.gone
            assert channel.is_garbled
            assert open_fds() == before


def test_a_peer_that_takes_nothing_does_not_fill_our_memory():
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(Channel(ours, max_queued=5)) as channel:
        for _ in range(100):
            channel.put({"text": "x" * 100_000}, [0])
        assert len(channel._queue) == 5


def test_whatever_is_sent_a_channel_returns_only_messages_and_keeps_no_descriptor():
    choose = random.Random(20261124)
    for _ in range(300):
        ours, theirs = socket.socketpair()
        before = open_fds()
        sent = []
        with ours, contextlib.closing(Channel(theirs, max_bytes=1000, max_fds=3)) as channel:
            for _ in range(choose.randrange(1, 8)):
                content = {"n": choose.randrange(1 << 30), "text": "x" * choose.randrange(200)}
                data = bytearray(encode(content))
                is_whole = choose.random() < 0.6
                if not is_whole:  # a byte is changed, or some are missing
                    data[choose.randrange(len(data))] = choose.randrange(256)
                    del data[choose.randrange(1, len(data) + 1) :]
                fds = [0] * choose.randrange(4)
                socket.send_fds(ours, [data], fds)
                sent.append((content, len(fds)) if is_whole else None)
                taken = channel.receive_available()
                if None not in sent:
                    assert [(message.content, len(message.fds)) for message in taken] == sent[-1:]
                for message in taken:
                    assert isinstance(message.content, dict)
                    message.close()
        assert open_fds() == before - 2


def test_no_descriptor_is_needed_to_send_what_the_other_takes_at_once(ends, monkeypatch):
    def refuse(fd):
        raise OSError(errno.EMFILE, "Too many open files")

    ours, theirs = ends
    monkeypatch.setattr(os, "dup", refuse)
    ours.put({"n": 1}, [0])
    (message,) = theirs.receive_available()
    assert len(message.fds) == 1
    message.close()
    while not ours.waiting:
        ours.put({"text": "x" * 100_000})
    before = len(ours._queue)
    with pytest.raises(OSError, match="Too many open files"):
        ours.put({"n": 2}, [0])
    assert len(ours._queue) == before  # the others arrive whole
