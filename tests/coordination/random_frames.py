"""Frames that say anything."""

import struct

from phalanx._comm.control.wire import Op, pack

WORDS = [
    b"",
    b"0",
    b"1",
    b"-1",
    b"9" * 19,
    b"9" * 40,
    b"a",
    b"key",
    b"{}",
    b'{"host": "x"}',
    b"[" * 5000,
    b"\xff",
    bytes(3),
]


def random_message(rng):
    """A request that is right, or nearly, or not at all."""
    what = rng.choice([*Op, *Op, 0, 200, 255])
    number = rng.choice([rng.randrange(40), rng.randrange(1 << 64)])
    fields = [rng.choice([*WORDS, rng.randbytes(rng.randrange(40))]) for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 9]))]
    return pack(what, number, *fields)


def random_frame(rng):
    """Messages, some of them cut, stretched, changed or mixed with noise."""
    frame = bytearray(b"".join(random_message(rng) for _ in range(rng.choice([0, 1, 1, 1, 2, 5]))))
    kind = rng.randrange(8)
    if kind == 0 and frame:
        del frame[rng.randrange(len(frame)) :]
    elif kind == 1:
        frame += rng.randbytes(rng.randrange(20))
    elif kind == 2 and frame:
        for _ in range(rng.randrange(1, 6)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
    elif kind == 3:
        frame = bytearray(rng.randbytes(rng.randrange(60)))
    elif kind == 4:
        frame += struct.pack("<HBQ", rng.choice([1, 0xFFFF]), Op.SET, 1) + struct.pack("<I", 0xFFFFFFFF)
    return bytes(frame)
