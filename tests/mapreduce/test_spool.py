"""What was written is read back, from memory or from disk; sorting and grouping by it give what a dict gives."""

import errno
import os
import random

import pytest

from phalanx.mapreduce.exchange import plan_rounds
from phalanx.mapreduce.grouper import Grouper
from phalanx.mapreduce.sizes import plan_next_look, size_of, size_of_lists, size_of_table
from phalanx.mapreduce.spool import Extent, Spool, Stream


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
    assert spool.append(b"new") == Extent(extents[20].offset, 3)
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
        extents = [Extent(rng.randrange(150), rng.randrange(10)) for _ in range(rng.randrange(8))]
        whole = b"".join(spool.read(*extent) for extent in extents)
        stream = Stream(spool, extents)
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
        grouper._next_look = min(grouper._next_look, 1 if limit_bytes == 1 else 64)
        grouper.add(keys, values)
    found = [(key, list(values)) for key, values in grouper.groups()]
    assert found == sorted(want.items())
    assert (spool.spilled_bytes > 0) == (limit_bytes < 1 << 30)
    spool.close()


def test_values_that_nobody_takes_are_passed_over():
    spool = Spool(0, None)
    grouper = Grouper(spool, 1, listed=True)
    for _ in range(3):
        grouper._next_look = 1
        grouper.add(["a", "b"], [list(range(3000)), [1]])
    assert [(key, next(values)) for key, values in grouper.groups()] == [("a", 0), ("b", 1)]
    spool.close()


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
    # One key of many has nearly all values, or a few have large ones: a sample of keys would not see them.
    skewed = {n: ["x"] for n in range(1000)} | {-1: ["x" * 1000] * 9000}
    assert 0.8 < size_of_lists(skewed) / 9_600_000 < 1.2
    assert size_of_lists({}) == 0
    assert size_of_lists({"a": 3}) < 1000
    assert size_of_table({}) == 0


def test_the_first_look_comes_early_and_the_next_when_what_is_held_may_have_doubled():
    """Of values of a MB each 256 were taken before anybody looked, whatever `memory_bytes` was."""
    assert plan_next_look(1, 10**6) == 2
    assert plan_next_look(100, 10**6) == 200
    assert plan_next_look(100, 20) == 110
    assert plan_next_look(100, 0.1) == 101
    assert plan_next_look(6400, 0.1) == 6500
