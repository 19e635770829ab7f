"""A key has one partition, in every process, and whatever is equal to it has the same."""

import datetime
import decimal
import enum
import fractions
import itertools
import os
import random
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import PurePosixPath, PureWindowsPath
from typing import NamedTuple

import numpy as np
import pytest
import torch

from phalanx.mapreduce import keys
from phalanx.mapreduce.keys import find_kinds, partitions_of, require_order, stable_hash

KEYS = [
    "", "a", "ä", "\ud800", b"", b"a", 0, 1, -1, 2**70, 0.5, 1e300, None, (), ("a", 1), (None, ("b", 2.5)),
    datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3), uuid.UUID(int=5), PurePosixPath("a/b"),
]  # fmt: skip


def test_the_hash_is_the_same_in_a_process_with_another_seed():
    code = (
        "import datetime, runpy; from uuid import UUID; from pathlib import PurePosixPath;"
        f"stable_hash = runpy.run_path({keys.__file__!r})['stable_hash'];"
        f"print([stable_hash(key) for key in {KEYS!r}])"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        assert run.stdout.strip() == str([stable_hash(key) for key in KEYS])


@pytest.mark.parametrize(
    "equal",
    [
        (1, 1.0, True, np.int64(1), np.float32(1), fractions.Fraction(1), decimal.Decimal(1)),
        (0.5, fractions.Fraction(1, 2), np.float64(0.5), decimal.Decimal("0.5")),
        (0, 0.0, -0.0, False),
        ("a", np.str_("a")),
        ((1, "a"), (1.0, np.str_("a"))),
    ],
)
def test_what_is_equal_has_one_hash(equal):
    assert all(one == equal[0] for one in equal)
    assert len({stable_hash(one) for one in equal}) == 1


def test_keys_are_spread_over_partitions():
    for some in (
        range(4000),
        [n / 8 for n in range(4000)],
        [f"word{n}" for n in range(4000)],
        [(n, 0) for n in range(4000)],
    ):
        counts = Counter(partitions_of(list(some), {type(some[0])}, 16))
        assert len(counts) == 16
        assert max(counts.values()) < 400
    assert list(partitions_of(["a", "\ud800"], {str}, 7)) == [stable_hash("a") % 7, stable_hash("\ud800") % 7]


class Colour(enum.Enum):
    RED = 1


def test_what_cannot_be_a_key_is_named():
    assert stable_hash(Colour.RED) == stable_hash(Colour.RED)
    for key in (object(), torch.tensor(1), frozenset([1]), 1j, [1]):
        with pytest.raises(TypeError, match=f"of type {type(key).__name__} cannot be a key"):
            stable_hash(key)
    for key in (
        (1, float("nan")),
        np.float32("nan"),
        decimal.Decimal("nan"),
    ):  # whose hash differs from process to process
        with pytest.raises(ValueError, match="NaN cannot be a key"):
            stable_hash(key)


def test_kinds_of_keys_that_have_no_order_are_named():
    require_order(find_kinds({int, float, bool, np.int64, decimal.Decimal}))
    require_order(set())
    with pytest.raises(TypeError, match=r"cannot be sorted: number, str\."):
        require_order(find_kinds({int, str}))
    with pytest.raises(TypeError, match=r"cannot be sorted: NoneType, bytes\."):
        require_order(find_kinds({type(None), bytes}))


class Text(str):
    __slots__ = ()


class Caseless(str):
    __slots__ = ()

    def __eq__(self, other):
        return self.lower() == other.lower()

    __hash__ = None


class Point(NamedTuple):
    x: float
    y: str


def test_generated_keys_that_are_equal_have_one_hash():
    """Windows paths that differ in case are one key of a dict; their partitions were two."""
    for seed in range(300):
        draw = random.Random(seed)
        number, text = draw.randint(-9, 9), "".join(draw.choices("aBÄß/ .", k=draw.randint(0, 4)))
        moment = datetime.datetime(2026, 1, draw.randint(1, 28), draw.randint(0, 23))
        utc = moment.replace(tzinfo=datetime.timezone.utc)
        forms = [
            [kind(number) for kind in (int, float, fractions.Fraction, decimal.Decimal)],
            [PureWindowsPath(one) for one in (text, text.swapcase(), text.upper(), f"./{text}")],
            [PurePosixPath(one) for one in (text, text.swapcase(), f"./{text}")],
            [text, np.str_(text), Text(text)],
            [moment, moment.replace(fold=1)],
            [utc, utc.astimezone(datetime.timezone(datetime.timedelta(hours=draw.randint(-9, 9))))],
            [(number, text), Point(number, text), (float(number), np.str_(text))],
        ]  # fmt: skip
        for one, other in itertools.combinations([form for kind in forms for form in kind], 2):
            if one == other and hash(one) == hash(other):
                assert stable_hash(one) == stable_hash(other), (one, other)


def test_a_class_with_its_own_equality_is_no_key():
    for key in (Caseless("A"), (1, Caseless("A"))):
        with pytest.raises(TypeError, match=r"the class defines its own equality.*\nLet map yield a plain str"):
            stable_hash(key)


def test_a_class_without_an_order_is_named():
    """Each rank raised or not, as its keys fell."""
    with pytest.raises(TypeError, match="keys cannot be sorted: a Colour, whose objects cannot be compared"):
        require_order(find_kinds({enum.Enum("Colour", "RED GREEN")}))
    require_order(find_kinds({type(None)}))
    require_order(find_kinds({enum.IntEnum("Level", "LOW HIGH")}))
