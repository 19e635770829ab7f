"""What was written is read back, from memory or from disk; sorting and grouping by it give what a dict gives."""

import errno
import os
import random
import tracemalloc

import numpy as np
import pytest

from phalanx.mapreduce.columns import unpack
from phalanx.mapreduce.exchange import plan_rounds
from phalanx.mapreduce.grouper import Grouper, read_blocks, write_blocks
from phalanx.mapreduce.sizes import (
    cut_by_size,
    plan_next_check,
    quick_size,
    size_of,
    size_of_lists,
    size_of_table,
)
from phalanx.mapreduce.spool import Spool, SpoolExtent, SpoolStream


@pytest.mark.parametrize("memory_bytes", [0, 20, 10**6])
def test_a_spool_gives_back_any_part_of_what_was_written(tmp_path, memory_bytes):
    rng = random.Random(3)
    spool, whole, extents = Spool(memory_bytes, str(tmp_path)), b"", []
    for _ in range(40):
        data = rng.randbytes(rng.randrange(6))
        extents.append(spool.append(data))
        whole += data
    assert [spool.read(*extent) for extent in extents] == [whole[at : at + n] for at, n in extents]
    for _ in range(100):
        start = rng.randrange(len(whole))
        length = rng.randrange(len(whole) - start + 1)
        assert spool.read(start, length) == whole[start : start + length]
    spool.truncate(extents[20].offset)
    assert spool.append(b"new") == SpoolExtent(extents[20].offset, 3)
    assert spool.read(extents[20].offset - 5, 8) == whole[extents[20].offset - 5 : extents[20].offset] + b"new"
    assert os.listdir(tmp_path) == []  # nothing to leave behind
    assert (spool.spilled_bytes > 0) == (memory_bytes < 100)
    spool.close()


def test_what_was_kept_is_still_there_when_the_disk_is_full(tmp_path, monkeypatch):
    """The task that found the disk full was done elsewhere, and what others had left in memory was read as zeros."""
    spool = Spool(10, str(tmp_path))
    first = spool.append(b"kept")

    def refuse(fd, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            spool.append(b"more than fits in memory")
        spool.truncate(first.length)
    assert spool.read(*first) == b"kept"
    monkeypatch.undo()
    more = spool.append(b"more than fits in memory")
    assert (spool.read(*first), spool.read(*more)) == (b"kept", b"more than fits in memory")
    spool.close()


def test_a_stream_is_its_extents_one_behind_the_other():
    rng = random.Random(5)
    spool = Spool(10**6, None)
    spool.append(rng.randbytes(200))
    for _ in range(50):
        extents = [SpoolExtent(rng.randrange(150), rng.randrange(10)) for _ in range(rng.randrange(8))]
        whole = b"".join(spool.read(*extent) for extent in extents)
        stream = SpoolStream(spool, extents)
        assert len(stream) == len(whole)
        for start in range(len(whole) + 1):
            length = rng.randrange(12)
            assert stream.read(start, length) == whole[start : start + length]
            if start + length <= len(whole):
                part = stream.part(start, length)
                assert part.read(0, length) == whole[start : start + length]


def test_rounds_of_the_shuffle_stay_within_their_share_of_the_memory():
    assert plan_rounds(0, 4, 1 << 30) == (0, 8 << 20)
    for memory in (1 << 20, 1 << 26):
        for world_size in (2, 4, 16):
            rounds, chunk = plan_rounds(10**8, world_size, memory)
            assert rounds * chunk >= 10**8 > (rounds - 1) * chunk
            assert 2 * world_size * chunk <= memory // 8


@pytest.mark.slow(but=("30000-False",))
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("limit_bytes", [1, 30_000, 1 << 30])
def test_groups_are_sorted_and_keep_the_order_of_values(limit_bytes, listed):
    """With a limit of one byte, every bucket is a run, and runs are merged twice."""
    rng = random.Random(9)
    spool = Spool(0, None)
    grouper, want = Grouper(spool, limit_bytes, listed=listed), {}
    for bucket in range(300):
        keys = rng.sample(range(200), 20)
        values = [[(bucket, i) for i in range(rng.randrange(1, 4))] if listed else (bucket, 0) for _ in keys]
        for key, value in zip(keys, values, strict=True):
            want.setdefault(key, []).extend(value if listed else [value])
        grouper._next_check = min(grouper._next_check, 1 if limit_bytes == 1 else 64)
        grouper.add(keys, values)
    found = [(key, list(values)) for key, values in grouper.groups()]
    assert found == sorted(want.items())
    assert (spool.spilled_bytes > 0) == (limit_bytes < 1 << 30)
    spool.close()


def test_values_that_nobody_takes_are_passed_over():
    spool = Spool(0, None)
    grouper = Grouper(spool, 1, listed=True)
    for _ in range(3):
        grouper._next_check = 1
        grouper.add(["a", "b"], [list(range(3000)), [1]])
    assert [(key, next(values)) for key, values in grouper.groups()] == [("a", 0), ("b", 1)]
    spool.close()


@pytest.mark.parametrize("listed", [False, True])
def test_a_merge_of_large_values_holds_a_few_at_a_time(listed):
    """Sixteen runs were merged with a value of each in memory: arrays of 1 MB took 18 MiB where 16 were asked for."""
    size, limit = 500_000, 1 << 20
    spool = Spool(0, None)
    grouper = Grouper(spool, limit, listed=listed)
    for number in range(60):
        value = bytes([number]) * size
        grouper.add([f"key {number % 5}"], [[value] if listed else value])
    tracemalloc.start()
    found = {key: b"".join(value[:1] for value in values) for key, values in grouper.groups()}
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == {f"key {k}": bytes(range(k, 60, 5)) for k in range(5)}
    assert most < 6 * size
    spool.close()


def test_blocks_are_cut_by_size_where_small_pairs_and_large_ones_take_turns():
    """A block of a thousand small results was followed by one of a thousand large ones."""
    rng = random.Random(6)
    for listed in (False, True):
        pairs = []
        for number in range(3000):
            length = rng.choice([10, 10, 10, 100, 30_000]) if number % 1000 > 900 else 10
            value = "x" * length
            pairs.append((number, [value] if listed else value))
        spool = Spool(0, None)
        run = write_blocks(spool, pairs, 20_000, listed=listed)
        assert list(read_blocks(spool, run)) == pairs
        for extent in run:
            keys, values = unpack(spool.read(*extent))
            assert len(keys) == 1 or sum(map(quick_size, values)) <= 20_000
        assert len(run) < 200
        spool.close()


def test_values_of_a_key_are_cut_by_number_and_by_size():
    def sizes(values, most, most_bytes):
        parts = list(cut_by_size(values, most, most_bytes))
        assert [one for part in parts for one in part] == values
        return [len(part) for part in parts]

    assert sizes(list(range(10)), 4, 10**6) == [4, 4, 2]
    assert sizes([0.5] * 10, 100, 100) == [3, 3, 3, 1]
    assert sizes(["x" * 100, "y"] * 3, 100, 400) == [2, 2, 2]
    assert sizes(["x" * 100, "y"] * 3, 100, 10) == [1] * 6
    assert sizes([(1,), b"x" * 1000, (2,), (3,), [4] * 500, (5,)], 100, 700) == [1, 1, 2, 1, 1]
    assert sizes([(1,)] * 7, 3, 10**6) == [3, 3, 1]
    assert sizes(["x"], 3, 1) == [1]


def test_keys_without_an_order_are_told():
    spool = Spool(0, None)
    grouper = Grouper(spool, 1 << 20, listed=False)
    grouper.add([(1, "a"), (1, 2)], [0, 0])
    with pytest.raises(TypeError, match=r"(?s)keys cannot be sorted: .*item by item"):
        list(grouper.groups())
    spool.close()


def test_sizes_follow_what_is_held():
    words = {f"word{n}": n for n in range(20_000)}
    by_hand = sum(map(size_of, words)) + sum(map(size_of, words.values())) + words.__sizeof__()
    assert 0.8 < size_of_table(words) / by_hand < 1.2
    assert size_of({"a": ["x" * 1000] * 50}) > 50_000
    # An array that was unpickled, or is a part of another, owns no memory: of such, four times as much was held.
    assert size_of(np.frombuffer(bytes(10**6))) > 10**6
    assert 400 < size_of(np.zeros(10**6)[:50]) < 1000
    # One key of many has nearly all values, or a few have large ones: a sample of keys would not see them.
    skewed = {n: ["x"] for n in range(1000)} | {-1: ["x" * 1000] * 9000}
    assert 0.8 < size_of_lists(skewed) / 9_600_000 < 1.2
    assert size_of_lists({}) == 0
    assert size_of_lists({"a": 3}) < 1000
    assert size_of_table({}) == 0


def test_the_first_look_comes_early_and_the_next_when_what_is_held_may_have_doubled():
    """Of values of a MB each 256 were taken before anybody looked, whatever `memory_bytes` was."""
    assert plan_next_check(1, 10**6) == 2
    assert plan_next_check(100, 10**6) == 200
    assert plan_next_check(100, 20) == 110
    assert plan_next_check(100, 0.1) == 101
    assert plan_next_check(6400, 0.1) == 6500
