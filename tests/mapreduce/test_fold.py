"""Pairs come into the dict in the same way in C and in Python."""

import gc
import operator
import random
import sys
import tracemalloc

import pytest

from phalanx.mapreduce.table import fold_in_python

_core = pytest.importorskip("phalanx._core")


class Odd:
    """Cannot be hashed, cannot be added, is a pair where it is iterated over."""

    __hash__ = None

    def __init__(self, *items):
        self.items = items

    def __iter__(self):
        return iter(self.items)

    def __repr__(self):
        return f"Odd{self.items}"


def records_of(rng):
    """Lists, tuples, generators of pairs; some with a mistake, some that raise."""
    for _ in range(rng.randrange(12)):
        pairs = []
        for _ in range(rng.randrange(5)):
            key = rng.choice(["a", "b", "c", 1, 1.0, True, (1, "a"), None])
            pair = (key, rng.choice([1, 2.5, -3, 10**30]))
            pairs.append(rng.choice([pair, pair, pair, list(pair), Odd(*pair)]))
        yield rng.choice(["plain", "plain", "plain", "raises", "at once", "no iterator", "mistake"]), pairs


def mapper(rng, kind, pairs):
    if kind == "at once":
        raise KeyError("at once")
    if kind == "no iterator":
        return 3
    if kind == "mistake" and rng.random() < 0.3:
        wrong = rng.choice([7, (1, 2, 3), (), "a", "abc", ([], 1), (Odd(), 1), ("a", None), ("a", "text"), None])
        return [*pairs, wrong, ("z", 1)]
    if kind == "raises":
        return (pair if n + 1 < len(pairs) else 1 / 0 for n, pair in enumerate(pairs))
    return rng.choice([list, tuple, iter])(pairs)


def subtract(a, b):
    return a - b


def outcome(fold, seed, combine):
    rng = random.Random(seed)
    values, told, limit = {}, [], rng.choice([1, 3, 1000])
    mapped = map(lambda record: mapper(rng, *record), list(records_of(rng)))
    while True:
        progress = [None, None, "nothing"]
        try:
            fold(values, mapped, combine, combine is operator.add, limit, progress)
            error = None
        except Exception as caught:
            error = type(caught)
        told.append((error, *progress[:2], repr(progress[2])))
        if progress[2] is not None or (error is None and progress[1] < limit):
            return repr(values), told


@pytest.mark.parametrize("combine", [None, operator.add, subtract], ids=["listed", "added", "combined"])
def test_c_does_what_python_does(combine):
    errors = set()
    for seed in range(1500):
        want = outcome(fold_in_python, seed, combine)
        assert outcome(_core.fold_pairs, seed, combine) == want, seed
        errors |= {error for error, *_ in want[1]}
    assert errors >= {None, KeyError, TypeError, ValueError, ZeroDivisionError}


def test_nothing_is_kept_of_what_was_folded():
    key, value = "a key of its own", object()
    counts = sys.getrefcount(key), sys.getrefcount(value)

    def work(rounds):
        for seed in range(rounds):
            for combine in (None, operator.add, subtract):
                outcome(_core.fold_pairs, seed % 40, combine)
            _core.fold_pairs(
                {}, iter([[(key, value)] * 9, ((key, value), [key, value])]), None, False, 99, [0, 0, None]
            )

    work(40)
    tracemalloc.start()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    work(400)
    gc.collect()  # what tracebacks hold in cycles
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 20_000
    assert (sys.getrefcount(key), sys.getrefcount(value)) == counts


def test_wrong_arguments_are_refused():
    for wrong in (
        ([], iter([]), None, False, 9, [0, 0, 0]),
        ({}, [], None, False, 9, [0, 0, 0]),
        ({}, iter([]), None, False, 9, []),
    ):
        with pytest.raises(TypeError):
            _core.fold_pairs(*wrong)
