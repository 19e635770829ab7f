"""A stream hands out what its shards hold, in any order, and says which shard is not what was said of it."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.streams import KINDS, Shards, draw_case, read_case
from torch.utils.data import DataLoader, RandomSampler

import phalanx
from phalanx.data import Stream
from phalanx.data.open_shards import IteratedShard
from phalanx.errors import CheckpointError, DataError


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_jobs_that_stop_and_go_on_with_other_ranks_and_workers_use_each_sample_once(effort: int, seed: int) -> None:
    for number in range(seed, seed + 20 * effort):
        check_case(number)


def check_case(seed: int) -> None:
    case = draw_case(seed)
    used = read_case(case)
    length = sum(case.shards.lengths)
    stream = case.shards.stream(**case.layout)
    sampler = phalanx.DistributedSampler(stream, 1, 0, shuffle=case.shuffle, seed=case.seed)
    for epoch in range(case.epochs):
        sampler.set_epoch(epoch)
        order = list(sampler)
        assert sorted(order) == list(range(length))
        counts = Counter(sample for e, _, sample in used if e == epoch)
        if case.padding:  # of each phase that comes to the end, which is one
            assert set(counts) == set(range(length)), seed
            assert sum(counts.values()) - length < 4, seed
            assert all(sample in order[:3] for sample, count in counts.items() if count > 1), seed
        elif case.drop_last:
            assert set(counts.values()) <= {1}, seed
            assert set(counts) >= set(order[: max(0, length - 3)]), seed
        else:
            assert counts == dict.fromkeys(range(length), 1), seed
    for position in case.positions:  # what has been used is the beginning of the order, whoever has used it
        if not position["consumed"]:
            continue
        sampler.set_epoch(position["epoch"])
        of_epoch = [sample for e, _, sample in used if e == position["epoch"]]
        prefix = list(sampler)[: position["consumed"]]
        assert set(of_epoch[: len(prefix)]) == set(prefix), seed


# -- what a shard is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_those_of_their_numbers_whatever_order_they_are_asked_for_in(kind, workers):
    stream = Shards((5, 0, 9, 1), (kind,) * 4).stream(window=4)
    assert len(stream) == 15
    order = random.Random(1).sample(range(15), 15)
    assert list(DataLoader(stream, batch_size=None, sampler=order, num_workers=workers)) == order
    assert stream[-1] == 14
    assert stream.__getitems__([3, 3, 12, 0]) == [3, 3, 12, 0]
    with pytest.raises(IndexError, match="sample 15 was requested, but the samples are 0 to 14"):
        stream[15]


def test_what_is_asked_for_of_an_index_is_asked_for_together():
    asked: list[list[int]] = []

    class Several(list[int]):
        def __getitems__(self, numbers: list[int]) -> list[int]:
            asked.append(numbers)
            return [self[number] for number in numbers]

    stream = Stream([0, 1], lambda shard: Several(range(10 * shard, 10 * shard + 10)), lengths=10)
    assert stream.__getitems__([1, 13, 2, 14]) == [1, 13, 2, 14]
    assert asked == [[1, 2], [3, 4]]


class Skips:
    """An iterator over numbers with `skip`, which notes how many were skipped."""

    def __init__(self, length: int, skipped: list[int]) -> None:
        self.length, self.skipped, self.at = length, skipped, 0

    def skip(self, count: int) -> None:
        self.skipped.append(count)
        self.at += count

    def __iter__(self):
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at > self.length:
            raise StopIteration
        return self.at - 1


def test_an_iterator_is_asked_to_skip_what_comes_before_the_window():
    skipped: list[int] = []

    def begin() -> Skips:
        return Skips(100, skipped)

    shard = IteratedShard("s", begin, begin(), 100, window=10)
    assert shard.get([57, 52]) == [57, 52]
    assert shard.get([51, 59]) == [51, 59]
    assert shard.get([80]) == [80]
    assert skipped == [50, 20]


def test_a_shard_holds_no_more_than_a_window():
    shard = IteratedShard("s", lambda: range(1000), range(1000), 1000, window=16)
    for number in (15, 31, 100, 999):
        assert shard.get([number]) == [number]
        assert len(shard._skipped) <= 15
    assert not shard.is_used_up  # the others of its last window may be asked for


def test_open_shards_are_no_more_than_lanes_and_are_closed():
    opened: list[int] = []
    closed: list[int] = []

    class Closes(list[int]):
        def close(self) -> None:
            closed.append(self[0])

    def read(shard: int) -> Closes:
        opened.append(shard)
        return Closes([shard])

    stream = Stream(range(10), read, lengths=1, interleave=2, readers=2)
    assert [stream[i] for i in range(10)] == list(range(10))
    assert closed == list(range(6))
    stream.close()
    assert sorted(closed) == opened


def test_a_transform_is_done_in_the_order_of_the_batch():
    drawn: list[int] = []
    stream = Stream([0, 1], lambda shard: [2 * shard, 2 * shard + 1], transform=lambda s: drawn.append(s) or -s)
    assert stream.__getitems__([3, 0, 2]) == [-3, 0, -2]
    assert drawn == [3, 0, 2]


# -- what is wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_with_another_number_of_samples_is_named(kind):
    shards = Shards((5, 5), (kind, kind))
    for said, found in ((6, "5"), (4, "5" if kind == "indexed" else "more than 4")):
        stream = Stream([0, 1], shards.read, lengths=said)
        with pytest.raises(DataError, match=f"shard 0 has {found} samples, but its length was given as {said}"):
            [stream[i] for i in range(said)]


@pytest.mark.slow
def test_a_shard_that_cannot_be_read_is_named_with_the_reason_also_by_a_worker():
    def read(shard: str) -> Any:
        raise FileNotFoundError(2, "No such file or directory", shard)

    stream = Stream(["a.tar"], read, lengths=3)
    message = r"samples 0 to 1 of shard 0, a.tar, cannot be read: FileNotFoundError"
    with pytest.raises(DataError, match=message):
        next(iter(DataLoader(stream, batch_size=2)))
    iterator = iter(DataLoader(stream, batch_size=2, num_workers=1))
    with pytest.raises(DataError, match=message):
        next(iterator)
    del iterator
    gc.collect()  # the traceback had it


def test_a_read_that_fails_as_networks_do_is_tried_again_from_where_it_was(caplog):
    failures = iter([4, 2])

    def read(shard: str) -> Any:
        fails_at = next(failures, None)
        for sample in range(6):
            if sample == fails_at:
                raise ConnectionResetError("the peer has gone")
            yield sample

    stream = Stream(["a"], read, lengths=6, retry_s=60.0)
    assert [stream[i] for i in range(6)] == list(range(6))
    assert "reading a: ConnectionResetError: the peer has gone. Retrying for up to 60 s." in caplog.text
    assert "reading a: succeeded after 2 failures." in caplog.text


def test_a_read_that_goes_on_failing_ends_when_its_time_is_over():
    def read(shard: str) -> Any:
        raise TimeoutError("no answer")

    stream = Stream(["a"], read, lengths=6, retry_s=0.0)
    with pytest.raises(DataError, match=r"cannot be read: TimeoutError: no answer\. Retries went on for 0 s\."):
        stream[0]


def test_an_order_that_jumps_is_told_once_with_what_to_do(caplog):
    stream = Shards((100,) * 4, ("read on",) * 4).stream(window=8)
    list(DataLoader(stream, batch_size=4, sampler=RandomSampler(stream, generator=torch.Generator().manual_seed(0))))
    assert caplog.text.count("Pass the DataLoader sampler=phalanx.DistributedSampler(stream)") == 1


def test_the_streams_own_order_is_no_jump(caplog):
    stream = Shards((100,) * 4, ("read on",) * 4).stream()
    sampler = phalanx.DistributedSampler(stream)
    for _ in range(3):
        assert sorted(DataLoader(stream, batch_size=None, sampler=sampler)) == list(range(400))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shards": "a.tar"}, r"shards must be a list, got the str 'a.tar': pass \['a.tar'\]"),
        ({"shards": []}, "there is no shard"),
        ({"read": 3}, "read must be a function of a shard, got a int"),
        ({"lengths": [1, 2]}, "2 lengths for 1 shards"),
        ({"lengths": [-1]}, "the length of shard a must be 0 samples or more, got -1"),
        ({"lengths": [0]}, "there is no sample in 1 shard"),
        ({"window": 0}, "window=0: each must be a number of 1 or more"),
        ({"retry_s": -1}, "retry_s must be zero seconds or more"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    given = {"shards": ["a"], "read": lambda _: [1], "lengths": 1} | arguments
    with pytest.raises((ValueError, TypeError), match=message):
        Stream(**given)


# -- lengths -----------------------------------------------------------------------------------------------------------


def test_lengths_that_nobody_says_are_counted():
    shards = Shards((3, 0, 7), KINDS)
    assert Stream(range(3), shards.read).lengths.tolist() == [3, 0, 7]
    assert Stream(range(3), shards.read, count=lambda shard: shard + 1).lengths.tolist() == [1, 2, 3]
    with pytest.raises(DataError, match=r"the samples of shard 1 cannot be counted: KeyError: 1"):
        Stream(range(3), lambda shard: {0: "a"}[shard])


def test_counted_lengths_are_kept_in_an_index_file_and_only_new_shards_are_counted(tmp_path):
    counted: list[str] = []

    def count(shard: str) -> int:
        counted.append(shard)
        return len(shard)

    index = tmp_path / "index.json"
    for shards in (["a", "bb"], ["a", "bb"], ["bb", "ccc"]):
        stream = Stream(shards, str, index=index, count=count)
        assert stream.lengths.tolist() == [len(shard) for shard in shards]
    assert counted == ["a", "bb", "ccc"]
    assert json.loads(index.read_text()) == {"phalanx_index": 1, "shards": {"a": 1, "bb": 2, "ccc": 3}}
    assert os.listdir(tmp_path) == ["index.json"]


def test_a_length_that_is_none_is_not_kept_and_numpys_are_numbers(tmp_path):
    """The index file kept wrong lengths, and NumPy's integers raised a TypeError after the count."""
    index = tmp_path / "index.json"
    with pytest.raises(ValueError, match=r"the length of shard a must be 0 samples or more, got 1\.5"):
        Stream(["a"], str, index=index, count=lambda shard: 1.5)
    assert Stream(["a"], str, index=index, count=lambda shard: np.int64(3)).lengths.tolist() == [3]


def test_an_index_may_lie_at_an_address():
    address = f"memory://index-{os.getpid()}.json"
    assert Stream(["abc"], list, index=address).lengths.tolist() == [3]
    assert Stream(["abc"], list, index=address, count=lambda _: 1 // 0).lengths.tolist() == [3]


@pytest.mark.parametrize("content", ["", "[]", '{"phalanx_index": 7, "shards": {}}'])
def test_a_file_that_is_no_index_is_named(tmp_path, content):
    index = tmp_path / "index.json"
    index.write_text(content)
    with pytest.raises(DataError, match=r"index\.json"):
        Stream(["a"], list, index=index)


def _count_slowly(folder: str, shard: str) -> int:
    with open(f"{folder}/counted", "a") as file:
        file.write(shard)
    return 1


def _make_stream(folder: str) -> None:
    Stream(["a", "b"], list, index=f"{folder}/index.json", count=lambda shard: _count_slowly(folder, shard))


def test_of_several_processes_one_counts(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_make_stream, args=(str(tmp_path),)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert sorted(Path(tmp_path / "counted").read_text()) == ["a", "b"]


class Unnamed:
    pass


def test_shards_without_a_name_cannot_be_found_again(tmp_path):
    """Their text was an address in memory: a saved position was refused after a restart, and an index file grew."""
    stream = Stream([Unnamed(), Unnamed()], lambda _: [0] * 5, lengths=5)
    with pytest.raises(ValueError, match="Give the class a __repr__ that names the shard"):
        phalanx.DistributedSampler(stream, 1, 0).state_dict()
    with pytest.raises(ValueError, match="Give the class a __repr__ that names the shard"):
        Stream([Unnamed()], lambda _: [0] * 5, index=tmp_path / "index.json")


def test_what_is_said_of_a_shard_that_was_skipped_past_its_end_is_true():
    def begin() -> Skips:
        return Skips(10, [])

    with pytest.raises(DataError, match="shard s has at most 50 samples, but its length was given as 100"):
        IteratedShard("s", begin, begin(), 100, window=10).get([57])


# -- with a sampler ----------------------------------------------------------------------------------------------------


def test_a_position_of_other_shards_lengths_or_numbers_is_refused_by_name():
    shards = Shards((5, 5, 5), ("indexed",) * 3)
    state = phalanx.DistributedSampler(shards.stream(), 1, 0).state_dict()
    assert set(state) == {"epoch", "consumed", "length", "seed", "shuffle", "shards", "interleave", "readers", "block",
                          "window"}  # fmt: skip
    for other, named in (
        (shards.stream(window=4), r"window 128 \(here 4\)"),
        (Shards((4, 6, 5), shards.kinds).stream(), r"shards \w+ \(here \w+\)"),
        (Stream(["a", "b", "c"], lambda _: [0] * 5, lengths=5), r"shards \w+ \(here \w+\)"),
    ):
        with pytest.raises(CheckpointError, match=f"the saved position belongs to another order: {named}"):
            phalanx.DistributedSampler(other, 1, 0).load_state_dict(state)
    plain = phalanx.DistributedSampler(range(15), 1, 0).state_dict()  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="the sampler's state lacks shards, interleave"):
        phalanx.DistributedSampler(shards.stream(), 1, 0).load_state_dict(plain)


@pytest.mark.slow
def test_a_stream_that_has_been_read_can_be_given_to_workers_that_are_forked_or_spawned():
    stream = Stream([0, 1], _read_range, lengths=50)
    sampler = phalanx.DistributedSampler(stream)
    assert stream[3] == 3  # a shard is open in this process
    for method in ("fork", "spawn"):
        loader: Any = DataLoader(stream, batch_size=10, sampler=sampler, num_workers=2, multiprocessing_context=method)
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(100))
    assert pickle.loads(pickle.dumps(stream))[99] == 99


def _read_range(shard: int) -> Any:
    return iter(range(50 * shard, 50 * shard + 50))


def test_epochs_of_a_stream_advance_by_themselves_with_workers_that_last():
    stream = Shards((30,) * 6, ("read on",) * 6).stream(window=8)
    loader = DataLoader(
        stream, batch_size=5, sampler=phalanx.DistributedSampler(stream), num_workers=2, persistent_workers=True
    )
    epochs = [torch.cat(list(loader)).tolist() for _ in range(3)]
    assert len(set(map(tuple, epochs))) == 3
    assert all(sorted(one) == list(range(180)) for one in epochs)
