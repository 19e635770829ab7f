"""What was packed is had again, to the type and the bit."""

import math
import random
import struct
import sys

import numpy as np
import torch

from phalanx.mapreduce.columns import pack, unpack

KINDS = [
    lambda rng: rng.choice(["", "a", "ä\n", "word", "\ud800", "\r", "\x00", "x" * 300]),
    lambda rng: rng.choice(["a", "b"]),
    lambda rng: rng.choice([b"", b"a", b"\n", b"\xff" * 9]),
    lambda rng: rng.randrange(-5, 5) * 10 ** rng.randrange(25),
    lambda rng: rng.choice([0.0, -0.0, math.inf, math.nan, 1e-310, 0.1]),
    lambda rng: rng.choice([True, 1, 1.0, None, "1"]),
    lambda rng: rng.choice([np.str_("a"), np.int64(3), np.float32(0.1), (1, "a")]),
    lambda rng: [rng.random(), {"a": 1}],
]


def same(one, other):
    if isinstance(one, float) and type(one) is type(other):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, list):
        return type(other) is list and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_keys_and_values_of_any_kind_come_back_as_they_were():
    rng = random.Random(13)
    for _ in range(400):
        key, value = rng.choice(KINDS), rng.choice(KINDS)
        count = rng.randrange(1, 12)
        keys, values = [key(rng) for _ in range(count)], [value(rng) for _ in range(count)]
        assert same(list(unpack(pack(keys, values))), [keys, values])
        listed = [[value(rng) for _ in range(rng.randrange(4))] for _ in range(count)]
        assert same(list(unpack(pack(keys, listed, listed=True))), [keys, listed])


def test_unpacked_lists_have_no_room_to_spare():
    """On Python 3.14 lists of one value took 88 bytes each, so that a block of 20,000 bytes held 23,256."""
    listed = [["x" * count] * count for count in range(20)]
    _, unpacked = unpack(pack(list(range(20)), listed, listed=True))
    assert [sys.getsizeof(one) for one in unpacked] == [sys.getsizeof([None] * count) for count in range(20)]


def test_text_and_numbers_take_no_more_room_than_they_have():
    words = [f"word{n}" for n in range(1000)]
    assert len(pack(words, [1] * 1000)) < len("\n".join(words)) + 1000 + 50
    assert len(pack(words, [10**6] * 1000)) < len("\n".join(words)) + 4000 + 50
    keys, tensors = unpack(pack(words[:3], [torch.ones(2)] * 3))
    assert keys == words[:3]
    assert torch.stack(tensors).sum() == 6
