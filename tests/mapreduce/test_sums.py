"""The table of integers by text adds up as a dict does, orders as Python does, and refuses what it cannot hold."""

import operator
import random
import subprocess
import sys
from collections import Counter

import pytest

from phalanx.mapreduce import grouper, map_reduce, table
from phalanx.mapreduce.columns import pack
from phalanx.mapreduce.grouper import Grouper
from phalanx.mapreduce.keys import partitions_of
from phalanx.mapreduce.spool import Spool
from phalanx.mapreduce.sums import new_sums, sorted_items

_core = pytest.importorskip("phalanx._core")
LETTERS = ["a", "b", "\0", "ä", "€", "\U0001f600", "\uffff", "\ud7ff", "\ue000", " "]


def texts(rng, count):
    """Of many lengths, several alike but for their last letter, or their first; of some, one is how another begins."""
    found = []
    for _ in range(count):
        whole = "".join(rng.choices(LETTERS, k=rng.choice([0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 33, 100])))
        found += [whole, whole + "\0", whole[1:], whole[:-1]]
    return found


def number(rng):
    return rng.choice([1, 1, 0, -1, 127, -129, 40_000, -(2**31), 2**31, 2**45, -(2**40)])


def fold(sums, records, limit=1 << 40):
    progress = [None] * 3
    sums.fold(iter(records), limit, progress)
    return progress


@pytest.mark.slow(but=("str",))
@pytest.mark.parametrize("kind", [str, bytes])
def test_sums_are_those_of_a_dict_in_python_s_order(kind):
    rng = random.Random(4)
    for size in (1, 3, 40, 3000):
        keys = texts(rng, size)
        pairs = [(key if kind is str else key.encode(), number(rng)) for key in rng.choices(keys, k=3 * len(keys))]
        want = Counter()
        for key, value in pairs:
            want[key] += value
        cuts = sorted(rng.choices(range(len(pairs)), k=size)) + [len(pairs)]
        sums = new_sums()
        assert fold(sums, (pairs[a:b] for a, b in zip([0, *cuts], cuts, strict=False))) == [len(cuts), len(pairs), None]
        assert list(sorted_items(sums)) == sorted(want.items())
        assert (len(sums), sums.key_type()) == (len(want), kind)
        for partitions in (1, 7, 32):
            ends = sums.partition(partitions)
            place = dict(zip(want, partitions_of(want, {kind}, partitions), strict=True))
            again = new_sums()
            for partition, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                own = [(key, value) for key, value in want.items() if place[key] == partition]
                assert list(zip(*sums.items(start, end), strict=True)) == own  # in the order in which they came
                if own:
                    packed = sums.pack(start, end)
                    assert packed == pack(*zip(*own, strict=True))
                    assert again.add(packed)
            assert list(sorted_items(again)) == sorted(want.items())


def test_a_record_with_another_pair_is_given_back_whole():
    for wrong in [("a", 1.0), ("a", True), (b"a", 1), (1, 1), ("a", 2**63), ("\ud800", 1), ["a", 1], 7, ("a",)]:
        sums = new_sums()
        record = [("a", 1), ("c", 2), wrong]
        assert fold(sums, [[("a", 5)], record, [("b", 1)]]) == [1, 1, record]
        assert list(sorted_items(sums)) == [("a", 5)]
    sums = new_sums()
    assert fold(sums, [[(b"a", 1)], [("a", 1)]]) == [1, 1, [("a", 1)]]


def test_no_sum_overflows():
    """What is added to all keys together must fit, so that no sum has to be looked at."""
    sums = new_sums()
    assert fold(sums, [[("a", 2**62)], [("b", -(2**62) + 1)], [("a", 1)]]) == [2, 2, [("a", 1)]]
    assert list(sorted_items(sums)) == [("a", 2**62), ("b", -(2**62) + 1)]
    assert fold(new_sums(), [[("a", -(2**63))]]) == [0, 0, [("a", -(2**63))]]
    assert not sums.add(pack(["b"], [1]))
    many = new_sums()
    assert not many.add(pack(["a", "b", "c"], [2**62] * 3))
    assert len(many) == 0


def test_an_exception_leaves_nothing_of_its_record():
    def broken():
        yield "a", 1
        raise KeyError("here")

    sums, progress = new_sums(), [None] * 3
    mapped = map(lambda make: make(), [lambda: [("a", 1)], broken, lambda: [("b", 1)]])
    with pytest.raises(KeyError):
        sums.fold(mapped, 1 << 30, progress)
    assert progress == [1, 1, None]
    sums.fold(mapped, 1 << 30, progress)
    assert progress == [1, 1, None]
    assert list(sorted_items(sums)) == [("a", 1), ("b", 1)]


def test_it_ends_with_the_record_that_reaches_the_limit_and_says_what_it_holds():
    sums = new_sums()
    records, pairs, refused = fold(sums, ([(f"word {n}", 1)] for n in range(10**9)), 1 << 20)
    assert (records, refused) == (pairs, None)
    assert records == len(sums)
    assert 1 << 20 <= sums.held_bytes() < 1.2 * (1 << 20)  # as it would be when it has grown
    assert records > 8000
    assert sums.text_bytes() == sum(len(f"word {n}") for n in range(records))


def test_packed_columns_of_other_kinds_are_refused_and_broken_ones_are_told():
    sums = new_sums()
    for keys, values in [([1], [1]), (["a"], [1.0]), (["a"], ["b"]), (["a\nb"], [1]), (["a"], [2**70])]:
        assert not sums.add(pack(keys, values))
    assert sums.add(pack(["a", "", "\ud800"], [1, 2, 3]))
    assert not sums.add(pack([b"a"], [1]))
    assert list(sorted_items(sums)) == [("", 2), ("a", 1), ("\ud800", 3)]
    sums = new_sums()
    whole = pack(["ab", "c"], [1, 2])
    for broken in (whole.replace(b"\n", b" "), whole[:2] + (99).to_bytes(8, "little") + whole[10:]):
        with pytest.raises(ValueError, match="packed columns"):
            sums.add(broken)
    assert not sums.add(b"")


def test_places_are_known_only_of_keys_in_order():
    sums = new_sums()
    fold(sums, [[("a", 1), ("b\n", 1)]])
    with pytest.raises(IndexError):
        sums.items(0, 1)
    sums.sort()
    assert sums.items(1, 2) == (["b\n"], [1])
    for start, stop in ((-1, 1), (1, 0), (0, 3)):
        with pytest.raises(IndexError):
            sums.items(start, stop)
    assert not sums.is_packable()
    with pytest.raises(ValueError, match="between them"):
        sums.pack(0, 2)
    fold(sums, [[("c", 1)]])
    with pytest.raises(IndexError):
        sums.items(0, 1)
    for wrong in ((7, 1, [0, 0, 0]), (iter([]), 1, [0]), (iter([]), 1, None)):
        with pytest.raises(TypeError):
            sums.fold(*wrong)
    with pytest.raises(ValueError, match="at least one"):
        sums.partition(0)
    with pytest.raises(TypeError):
        sums.add("text")


def test_no_reference_is_kept():
    key, value = "a key of its own", 2**40
    counts = sys.getrefcount(key), sys.getrefcount(value)
    for _ in range(50):
        sums = new_sums()
        fold(sums, [[(key, value)] * 9, [(key, value), (key, key)]])
        sums.sort()
        sums.items(0, 1)
    assert (sys.getrefcount(key), sys.getrefcount(value)) == counts


@pytest.mark.parametrize("limit_bytes", [20_000, 1 << 30])
def test_groups_are_those_of_a_dict_when_other_values_come_in_between(limit_bytes):
    rng = random.Random(8)
    for others in (0, 1, 10):  # buckets with a fraction
        spool, want = Spool(0, None), {}
        group = Grouper(spool, limit_bytes, listed=False, adds=True)
        fractions = rng.sample(range(40), others)
        for bucket in range(40):
            keys = list({key for key in texts(rng, 30) if "\n" not in key})
            values = [0.5 if bucket in fractions else rng.randrange(99) for _ in keys]
            for key, value in zip(keys, values, strict=True):
                want[key] = want.get(key, 0) + value
            group.add_packed(pack(keys, values))
        assert [(key, sum(values)) for key, values in group.groups()] == sorted(want.items())
        spool.close()


VALUES = {
    "ones": lambda place, word: 1,
    "lengths": lambda place, word: -len(word),
    "late fractions": lambda place, word: 0.5 if place > 2000 else 1,
    "large": lambda place, word: 10**17,
    "too large": lambda place, word: 10**30 if place % 700 == 699 else 1,
    "lines in keys": lambda place, word: 1,
}


@pytest.mark.slow(but=("1048576-large", "1048576-ones"))
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("memory_bytes", [1 << 20, pytest.param(1 << 26, marks=pytest.mark.slow)])
def test_a_job_gives_the_same_with_and_without_it(monkeypatch, name, memory_bytes):
    """Little memory: tables are emptied in between, and partitions sorted by merging."""
    rng = random.Random(name)
    words = texts(rng, 3000) + [f"word {n}" for n in range(6000)]
    if name == "lines in keys":
        words += ["a\nb", "\n"]
    records = [rng.choices(words, k=rng.randrange(9)) for _ in range(4000)]

    def mapped(place):
        for word in records[place]:
            yield word, VALUES[name](place, word)

    def job():
        result = map_reduce(
            range(4000), mapped, lambda key, values: sum(values), combine=operator.add, split_records=1500,
            memory_bytes=memory_bytes, partitions=3,
        )  # fmt: skip
        return list(result), result.counters.pairs, result.counters.records

    found = job()
    want = {}
    for place, record in enumerate(records):
        for word in record:
            want[word] = want.get(word, 0) + VALUES[name](place, word)
    assert found[0] == sorted(want.items())
    for module in (table, grouper):
        monkeypatch.setattr(module, "new_sums", lambda: None)
    assert job() == found


def test_a_table_that_was_not_made_cannot_be_used():
    """`TextSums.__new__(TextSums)`, as pickle and copy make objects, had no memory: the first key ended the process."""
    with pytest.raises(TypeError):
        _core.TextSums.__new__(_core.TextSums)
    sums = new_sums()
    fold(sums, [[("a", 1)]])
    sums.__init__(1)  # says nothing new
    assert list(sorted_items(sums)) == [("a", 1)]


def damaged(rng, packed):
    data = bytearray(packed)
    if rng.random() < 0.3:
        return bytes(data[: rng.randrange(len(data))])
    if rng.random() < 0.1:
        data += rng.randbytes(rng.randrange(1, 9))
    for _ in range(rng.choice([1, 1, 3, 30])):
        at = rng.randrange(10) if rng.random() < 0.3 else rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


@pytest.mark.parametrize("kind", [str, bytes])
def test_damaged_columns_are_added_whole_or_not_at_all(kind):
    """Of columns with fewer keys than numbers the first were added, and bytes that make up no number were cut."""
    rng = random.Random(11)
    refused = 0
    for _ in range(1500):
        sums = new_sums()
        fold(sums, [[("old" if kind is str else b"old", 5)]])
        keys = list(dict.fromkeys(key if kind is str else key.encode() for key in texts(rng, rng.choice([1, 3, 20]))))
        data = damaged(rng, pack(keys, [number(rng) for _ in keys]))
        before = (len(sums), sums.text_bytes(), sums.held_bytes())
        try:
            count = sums.add(data)
        except ValueError:
            count = 0
            refused += 1
        if count == 0:
            assert (len(sums), sums.text_bytes(), sums.held_bytes()) == before
            continue
        length, width = int.from_bytes(data[2:10], "little"), {"b": 1, "h": 2, "i": 4, "q": 8}[chr(data[1])]
        keys = data[10 : 10 + length].split(b"\n")
        numbers = data[10 + length :]
        assert (len(keys), len(numbers)) == (count, count * width)
        want = Counter({b"old": 5})
        for i, key in enumerate(keys):
            want[key] += int.from_bytes(numbers[i * width : (i + 1) * width], "little", signed=True)
        assert sums.text_bytes() == sum(map(len, want))
        if kind is bytes:
            assert dict(sorted_items(sums)) == want
    assert refused > 300


OUT_OF_MEMORY = """
import resource
from phalanx._core import TextSums

sums = TextSums(1)
sums.fold(iter([[(str(i), 1) for i in range(1_200_000)]]), 1 << 40, [0, 0, None])
sums.sort()
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), resource.RLIM_INFINITY))  # a column of 19 MB has no room
try:
    sums.partition(3)
except MemoryError:
    print("no memory")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for ask in (sums.pack, sums.items):
    try:
        ask(0, 1000)
    except IndexError:
        print("no places")
"""


@pytest.mark.slow
def test_an_order_for_which_there_was_no_memory_is_none():
    """The places of the order before were still valid, in memory that nobody had written."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, timeout=600)
    assert (done.stdout.split("\n"), done.stderr) == (["no memory", "no places", "no places", ""], "")
