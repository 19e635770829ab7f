"""What one process gives, and what it says when something is wrong."""

import gc
import logging
import operator
import os
import random
from collections import Counter

import pytest
from tests.on_ranks import on_ranks

from phalanx.errors import ClosedError, PhalanxError
from phalanx.mapreduce import Records, TaskError, map_reduce, read_parts

WORDS = ["alpha", "beta", "gamma", "delta", "ä", "x" * 50]


def count(line):
    for word in line.split():
        yield word, 1


def add_up(key, values):
    return sum(values)


@pytest.fixture
def text(tmp_path):
    rng = random.Random(1)
    path = tmp_path / "text.txt"
    path.write_text("\n".join(" ".join(rng.choices(WORDS, k=rng.randrange(9))) for _ in range(500)), encoding="utf-8")
    return path


def counted(path):
    return dict(sorted(Counter(path.read_text(encoding="utf-8").split()).items()))


@pytest.mark.parametrize("combine", [None, operator.add, lambda a, b: a + b])
def test_word_count_is_that_of_a_counter(text, combine):
    result = map_reduce(text, count, add_up, combine=combine, split_bytes=700)
    assert list(result) == list(counted(text).items())
    assert list(result) == list(result)  # as often as one likes
    assert result.counters.records == 500
    assert result.counters.pairs == sum(counted(text).values())
    assert result.num_tasks == -(-text.stat().st_size // 700)
    assert sorted(dict(pair for number in result.partitions for pair in result.partition(number))) == sorted(
        counted(text)
    )


def test_an_inverted_index(tmp_path):
    texts = {"a.txt": "the cat\nthe dog", "b.txt": "a dog", "c.txt": ""}
    for name, words in texts.items():
        (tmp_path / name).write_text(words)

    def words_of(path):
        for word in set(path.read_text().split()):
            yield word, path.name

    index = map_reduce(Records(sorted(tmp_path.iterdir())), words_of, lambda word, names: list(names))
    assert dict(index) == {"a": ["b.txt"], "cat": ["a.txt"], "dog": ["a.txt", "b.txt"], "the": ["a.txt"]}


def test_a_bad_record_has_no_effect_and_is_shown(text, caplog):
    def count_some(line):
        for number, word in enumerate(line.split()):
            if word == "gamma" and number == 2:
                raise KeyError(f"third word of {line!r}")
            yield word, 1

    text.write_bytes(text.read_bytes() + b"\n\xff\nalpha")
    lines = [line for line in text.read_bytes().split(b"\n") if line != b"\xff"]
    good = [line.decode() for line in lines if line.decode().split()[2:3] != ["gamma"]]
    with caplog.at_level(logging.WARNING, "phalanx"):
        result = map_reduce(text, count_some, add_up, split_bytes=300, max_bad_records=100)
    assert dict(result) == Counter(" ".join(good).split())
    assert result.counters.num_bad_records == len(lines) - len(good) + 1
    assert result.counters.records == len(lines) + 1
    first = result.bad_records[0]
    assert first.error.startswith("KeyError: ")
    assert first.where.startswith(f"{text}, byte ")
    at = int(first.where.rpartition(" ")[2])
    assert repr(text.read_bytes()[at:].split(b"\n")[0].decode()) == first.record
    assert "count_some" in first.traceback
    assert f"{result.counters.num_bad_records} of {result.counters.records} records were bad:\n  {first}" in caplog.text


def test_too_many_bad_records_end_the_job_with_the_first(text):
    def fail(line):
        raise ZeroDivisionError("no such line")

    with pytest.raises(
        TaskError, match=r"(?s)101 records are bad, and 100 are allowed .*ZeroDivisionError: no such line.*in fail"
    ):
        map_reduce(text, fail, add_up, split_bytes=1000, max_bad_records=100) if text.write_text("x\n" * 101) else None
    text.write_text("x\ny\n")
    with pytest.raises(PhalanxError, match="all records are bad"):
        map_reduce(text, fail, add_up, max_bad_records=None)


def test_the_first_bad_record_ends_the_job_by_default():
    """A map that raised for some records, or a dataset that could not be read, was a line and a partial result."""

    class Unreadable:
        def __len__(self):
            return 50

        def __getitem__(self, index):
            if index == 30:
                raise OSError("no such disk")
            return index

    with pytest.raises(TaskError, match=r"(?s)1 record is bad, and 0 are allowed .*OSError: no such disk"):
        map_reduce(Unreadable(), lambda n: [(n, 1)], add_up)
    with pytest.raises(TaskError, match=r"(?s)and 0 are allowed .*ZeroDivisionError"):
        map_reduce(list(range(-5, 6)), lambda n: [(1 // n, 1)], add_up)


def test_stop_iteration_in_map_makes_a_record_bad_and_not_the_end():
    """next() of an empty iterator ended the loop over the records of a slice, and the rest was never seen."""

    def first_char(word):
        return [(next(iter(word)), 1)]

    for records in (["", "a", "b", "a", ""], ["a", "", "", "b", "a"]):
        result = map_reduce(Records(records), first_char, add_up, max_bad_records=2)
        assert dict(result) == {"a": 2, "b": 1}
        assert result.counters.num_bad_records == 2
        assert [int(one.record) for one in result.bad_records] == [n for n in range(5) if not records[n]]


@pytest.mark.parametrize(
    ("mapped", "told"),
    [
        ([3], r"map must yield \(key, value\) pairs, but yielded 3"),
        ([("a", 1, 2)], r"pairs, but yielded \('a', 1, 2\)"),
        ([([], 1)], r"yielded the key \[\], a list, which cannot be hashed"),
        ([("a", 1), ("a", "b")], r"combine raised TypeError: unsupported operand"),
        ([(object(), 1)], r"of type object cannot be a key"),
        ([("a", 1), (1, 1)], r"keys of different kinds cannot be sorted: number, str"),
        ([((1, "a"), 1), ((1, 1), 1)], r"keys cannot be sorted: '<' not supported"),
    ],
)
def test_mistakes_of_the_map_function_are_no_bad_records(mapped, told):
    with pytest.raises(TypeError, match=told):
        map_reduce([0], lambda record: mapped, add_up, combine=operator.add, partitions=1)


def test_what_cannot_be_sent_is_named():
    for mapped, reduced in ((lambda: 0, sum), (1, lambda key, values: (v for v in values))):
        with pytest.raises(TypeError, match=r"map_reduce: <.* of type \w+ cannot be sent to another rank or to disk"):
            map_reduce([0], lambda n, value=mapped: [(n, value)], reduced)


def test_an_error_of_reduce_names_the_key():
    def divide(key, values):
        return 1 / (key - 3)

    with pytest.raises(TaskError, match=r"reduce failed for key 3: ZeroDivisionError: division by zero") as caught:
        map_reduce(range(5), lambda n: [(n, n)], divide)
    assert isinstance(caught.value.__cause__, TaskError)
    assert isinstance(caught.value.__cause__.__cause__, ZeroDivisionError)


class Silent(ValueError):
    def __str__(self):
        raise LookupError("no text here")


@pytest.mark.parametrize("where", ["map", "reduce"])
@on_ranks(2)
def test_an_error_whose_text_cannot_be_had_is_told_on_every_rank(where):
    def fail(*_):
        raise Silent

    mapped, reduced = (fail, lambda key, values: 0) if where == "map" else (lambda n: [(n, n)], fail)
    with pytest.raises(TaskError) as caught:
        map_reduce(range(5), mapped, reduced)
    said = str(caught.value)
    assert "Silent: (no message: __str__ raised builtins.LookupError)" in said


def test_a_task_that_fails_is_tried_again_and_the_failures_are_told(text, caplog):
    path = text.with_suffix(".gz")
    path.write_bytes(b"this is no gzip")
    with pytest.raises(
        TaskError, match=r"(?s)task 0 .*text.gz.* failed 3 times\..*On rank 0:.*BadGzipFile.*On rank 0:"
    ):
        map_reduce([path], count, add_up)
    calls = []

    class Flaky:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            calls.append(index)
            if len(calls) == 2:
                raise MemoryError("try again")
            return index

    assert dict(map_reduce(Flaky(), lambda n: [(n, 1)], add_up, split_records=3)) == {0: 1, 1: 1, 2: 1}
    assert calls == [0, 1, 0, 1, 2]


def test_a_line_of_many_megabytes_is_bad_without_being_shown_whole(tmp_path):
    path = tmp_path / "text"
    path.write_text("x" * 10**7 + "\nword\n")
    result = map_reduce(path, lambda line: [(line, 1 // (len(line) < 9))], add_up, max_bad_records=1)
    assert list(result) == [("word", 1)]
    assert len(result.bad_records[0].record) < 300


def test_what_a_killed_rank_left_of_a_part_is_removed(text, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / ".part-00001-of-00003.jsonl.0123abcd.partial").write_text("[")
    map_reduce(text, count, add_up, output=folder, partitions=3)
    assert len(os.listdir(folder)) == 3


def test_each_part_is_on_the_disk_before_it_has_its_name(text, tmp_path, monkeypatch):
    """After a power cut a part could be there, and be empty."""
    durable = []

    def fsync(descriptor):
        durable.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    result = map_reduce(text, count, add_up, output=tmp_path / "out", partitions=3)
    for path in (*result.files, tmp_path / "out"):
        assert path.stat().st_ino in durable


def test_the_result_goes_to_files_that_are_whole(text, tmp_path):
    folder = tmp_path / "out"
    result = map_reduce(text, count, add_up, output=folder, partitions=3)
    assert [path.name for path in result.files] == [f"part-0000{n}-of-00003.jsonl" for n in range(3)]
    assert sorted(os.listdir(folder)) == [path.name for path in result.files]
    assert dict(read_parts(folder)) == counted(text)
    map_reduce(text, count, lambda key, values: 0, output=folder, partitions=3)
    assert set(dict(read_parts(folder)).values()) == {0}
    with pytest.raises(ValueError, match=r"holds the result of another run \(part-00000-of-00003.jsonl"):
        map_reduce(text, count, add_up, output=folder, partitions=4)
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        map_reduce(text, count, lambda key, values: {1}, output=folder, partitions=3)
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_empty_inputs_give_empty_results(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    for inputs in ([], tmp_path / "empty", Records([])):
        result = map_reduce(inputs, count, add_up, gather=True)
        assert list(result) == []
        assert (result.counters.records, len(result.partitions)) == (0, 32)
    assert list(map_reduce([1, 2], lambda record: (), add_up)) == []


def test_wrong_arguments_are_refused_before_anything_is_read():
    def call(**wrong):
        return map_reduce(**{"inputs": [1], "map": count, "reduce": add_up, **wrong})

    for wrong, error, told in [
        ({"map": 3}, TypeError, "map must be a function, got 3"),
        ({"reduce": None}, TypeError, "reduce must be a function"),
        ({"combine": "sum"}, TypeError, "combine must be a function of two values or None"),
        ({"partitions": 0}, ValueError, "partitions must be at least 1, got 0"),
        ({"partitions": 2.5}, TypeError, "partitions must be an integer"),
        ({"memory_bytes": 1000}, ValueError, "memory_bytes must be at least 1,048,576, got 1,000"),
        ({"split_bytes": 0}, ValueError, "split_bytes must be at least 1"),
        ({"max_attempts": 0}, ValueError, "max_attempts must be at least 1"),
        ({"encoding": "utf-16"}, ValueError, "lines of utf-16 cannot be found by a byte"),
        ({"encoding": "klingon"}, ValueError, "Python has no text encoding 'klingon'"),
        ({"spill_folder": "/nowhere"}, ValueError, "spill_folder '/nowhere' is not a folder"),
        ({"inputs": "/nowhere"}, FileNotFoundError, "there is no file '/nowhere'"),
        ({"inputs": 5}, TypeError, "inputs is a int"),
        (
            {"inputs": {0: "a"}},
            TypeError,
            r"inputs is a dict, .* Give list\(inputs.items\(\)\): a record is then a pair",
        ),
    ]:
        with pytest.raises(error, match=told):
            call(**wrong)


def test_the_collector_is_left_as_it_was():
    before = gc.get_threshold()
    map_reduce([1], lambda n: [(n, gc.get_threshold())], lambda key, values: list(values))
    assert gc.get_threshold() == before


@pytest.mark.parametrize("memory_bytes", [1 << 20, 1 << 30])
def test_a_closed_result_says_so_instead_of_being_empty(text, memory_bytes):
    with map_reduce(
        text, lambda line: [(line, line * 2000)], lambda key, values: list(values), memory_bytes=memory_bytes
    ) as result:
        items = iter(result)
        next(items)
    again = [lambda: list(items)] if memory_bytes == 1 << 20 else []  # else one block, which it has read already
    for read in (*again, lambda: list(result), lambda: list(result.partition(0))):
        with pytest.raises(ClosedError, match="this result is closed"):
            read()


def test_a_key_that_no_file_can_hold_is_named(tmp_path):
    """It was an error of ours: a partition could not be reduced."""
    with pytest.raises(TypeError, match=r"key 'a\\udc80' .* cannot be written as JSON"):
        map_reduce(Records(["x"]), lambda _: [("a\udc80", 1)], add_up, output=str(tmp_path / "out"))
