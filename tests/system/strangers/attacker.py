"""Somebody without the job's key who reaches its ports: `python attacker.py KIND NUM_FRAMES ADDRESS:PORT...`.

He comes from all addresses that this host has.

It says "here" once it has done all of its kind for the first time, and goes on until it is killed. Each kind is a
generator, which yields when a round is over.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import resource
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import zmq

from phalanx._base.host_addresses import own_addresses

Place = tuple[str, int]
_OPEN_FILES = 8192
_SHORTLY_MS = 100  # in which a connection is taken that somebody takes
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_CURVE, _NULL, _PLAIN = (name.ljust(20, b"\0") + bytes(32) for name in (b"CURVE", b"NULL", b"PLAIN"))
_WEB = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
_LAST_PORT = 65535
_BIND_ADDRESS_NO_PORT = 24  # of <linux/in.h>: the port is chosen when it connects


_sources: Iterator[str] = iter(())


def opened(places: Sequence[Place], count: int, receive_bytes: int = 0) -> list[socket.socket]:
    """`count` connections in all, to these places in turn; those that nobody took in a moment are closed."""
    waiting = []
    for place in itertools.islice(itertools.cycle(places), count):
        one = socket.socket()
        if receive_bytes:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        one.setblocking(False)
        one.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
        one.bind((next(_sources), 0))
        one.connect_ex(place)
        waiting.append(one)
    poll = select.poll()
    by_descriptor = {one.fileno(): one for one in waiting}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLOUT)
    taken = []
    while by_descriptor and (events := poll.poll(_SHORTLY_MS)):
        for descriptor, what in events:
            poll.unregister(descriptor)
            one = by_descriptor.pop(descriptor)
            if what & (select.POLLERR | select.POLLHUP):
                one.close()
            else:
                taken.append(one)
    close_all([*by_descriptor.values()])
    return taken


def say(one: socket.socket, data: bytes) -> bool:
    """Send what goes into the connection now; False if that is closed."""
    try:
        one.send(data)
    except BlockingIOError:
        pass
    except OSError:
        return False
    return True


def close_all(connections: Sequence[socket.socket]) -> None:
    for one in connections:
        one.close()


def hold(places: Sequence[Place], rng: random.Random, num_frames: int) -> Iterator[None]:
    """Keep more connections open than a process may have descriptors, with one byte said over each."""
    kept: list[socket.socket] = []
    while True:
        kept = [one for one in kept if say(one, b"\xff")]
        kept += opened(places, max(2000 - len(kept), 0))
        yield
        time.sleep(0.3)


def half_frames(places: Sequence[Place], rng: random.Random, num_frames: int) -> Iterator[None]:
    """Announce frames of 9 MiB before anything is authenticated, and send as much of them as is taken."""
    while True:
        kept = opened(places, 150)
        head = _GREETING + rng.choice([_CURVE, _NULL, _PLAIN]) + b"\x06" + struct.pack(">Q", 9 << 20)
        for data in (head, *[bytes(1 << 16)] * 144):
            kept = [one for one in kept if say(one, data)]
        yield
        close_all(kept)


def huge_frames(places: Sequence[Place], rng: random.Random, num_frames: int) -> Iterator[None]:
    """Send two frames of 1.5 GB to each port, as fast as they are taken, after the greeting of one without a key."""
    while True:
        kept = opened(places, 2 * len(places))
        head = _GREETING + rng.choice([_NULL, _CURVE]) + b"\x02" + struct.pack(">Q", 3 << 29)
        kept = [one for one in kept if say(one, head)]
        block = bytes(1 << 20)
        for _ in range(200):
            kept = [one for one in kept if say(one, block)]
        yield
        close_all(kept)


def read_slowly(places: Sequence[Place], rng: random.Random, num_frames: int) -> Iterator[None]:
    """Say one byte of a handshake at a time, and read the answers through the smallest window, or never."""
    handshake = _GREETING + _CURVE + b"\x04\xc8\x05HELLO" + rng.randbytes(194)
    while True:
        kept = opened(places, 200, receive_bytes=1)
        for number, byte in enumerate(handshake):
            kept = [one for one in kept if say(one, bytes([byte]))]
            for one in kept[: len(kept) // 2]:
                with contextlib.suppress(OSError):
                    one.recv(1)
            if number % 40 == 0:
                time.sleep(0.05)
        yield
        time.sleep(1.0)
        close_all(kept)


def scan(places: Sequence[Place], rng: random.Random, num_frames: int) -> Iterator[None]:
    """Try every port, of some host of the job, and say to what answers what port scanners say."""
    said = [_WEB, b"SSH-2.0-x\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200), b"\r\n", b""]
    while True:
        for first in range(1, _LAST_PORT, 4096):
            ports = range(first, min(first + 4096, _LAST_PORT + 1))
            found = opened([(rng.choice(places)[0], port) for port in ports], len(ports))
            for one, data in itertools.product(found, said):
                say(one, data)
            for one in found:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with a reset
            close_all(found)
        yield


def churn(places: Sequence[Place], rng: random.Random, num_frames: int) -> Iterator[None]:
    """Connect and go, as often as that is possible."""
    while True:
        for _ in range(20):
            kept = opened(places, 300)
            for one in kept[::2]:
                say(one, _GREETING)
            close_all(kept)
        yield


def other_keys(places: Sequence[Place], rng: random.Random, num_frames: int) -> Iterator[None]:
    """Come with ZeroMQ's own client: without a key, with a password, with the key of another job."""
    context = zmq.Context()
    public, _ = zmq.curve_keypair()
    for number, (address, port) in itertools.product(range(20), places):
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        if number % 3 == 1:
            dealer.plain_username, dealer.plain_password = b"root", b"root"
        elif number % 3 == 2:
            dealer.curve_serverkey = public
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.connect(f"tcp://{address}:{port}")
        for _ in range(20):
            dealer.send_multipart([b"hello", bytes(1000)], zmq.NOBLOCK)
    while True:
        time.sleep(1.0)
        yield


def fuzz(places: Sequence[Place], rng: random.Random, num_frames: int) -> Iterator[None]:
    """Say random parts of ZeroMQ's handshake and of what follows it, changed, cut, repeated and mixed with noise."""
    while True:
        left = num_frames
        while left > 0:
            kept = opened(places, 100)
            for _ in range(8):
                left -= max(len(kept), 1)
                kept = [one for one in kept if say(one, random_bytes(rng))]
            close_all(kept)
        yield


def web_requests(places: Sequence[Place], rng: random.Random, num_frames: int) -> Iterator[None]:
    """Ask for pages: with no end of fields, with half a line, with wrong tokens, and without reading an answer."""
    wrong = b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer wrong\r\n\r\n"
    while True:
        kept = opened(places, 300, receive_bytes=1)
        for data in (_WEB[:-2], b"x: " + bytes(8000) + b"\r\n", b"x: y\r\n" * 3000):
            kept = [one for one in kept if say(one, data)]
        kept += opened(places, 300, receive_bytes=1)
        for one in kept:
            say(one, rng.choice([b"GET /met", wrong, wrong * 100]))
        yield
        time.sleep(0.3)
        close_all(kept)


def random_bytes(rng: random.Random) -> bytes:
    """Return bytes that nearly make sense."""
    parts = [
        _GREETING, _GREETING[: rng.randrange(12)], _CURVE, _NULL, _PLAIN, _WEB, b"\x04\x26\x05READY", rng.randbytes(32),
        b"\x04\xc8\x05HELLO" + rng.randbytes(194), b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + rng.randbytes(120),
        b"\x06" + struct.pack(">Q", rng.randrange(1 << 63)), b"\x02" + struct.pack(">Q", rng.randrange(1 << 20)),
        b"\x04\x10\x08INITIATE" + rng.randbytes(8), b"\x01\x00", rng.randbytes(rng.randrange(300)), b"",
    ]  # fmt: skip
    data = bytearray(b"".join(rng.choices(parts, k=rng.randrange(1, 6))))
    for _ in range(rng.choice([0, 0, 1, 5])):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data) + 1)]) if rng.random() < 0.2 else bytes(data)


KINDS: dict[str, Callable[[Sequence[Place], random.Random, int], Iterator[None]]] = {
    kind.__name__: kind
    for kind in (hold, half_frames, huge_frames, read_slowly, scan, churn, other_keys, fuzz, web_requests)
}


def main() -> None:
    kind, num_frames, *words = sys.argv[1:]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _OPEN_FILES), hard))
    global _sources
    _sources = itertools.cycle([own.address for own in own_addresses() if "." in own.address and not own.is_loopback])
    places = [(address, int(port)) for address, _, port in (word.partition(":") for word in words)]
    rounds = KINDS[kind](places, random.Random(num_frames), int(num_frames))
    next(rounds)
    print("here", flush=True)
    for _ in rounds:
        if os.getppid() == 1:  # the test was killed
            return


if __name__ == "__main__":
    main()
