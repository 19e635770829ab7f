"""Every line of every file is read once, wherever it is cut."""

import bz2
import gzip
import lzma
import random

import pytest

from phalanx.mapreduce.records import read_blocks
from phalanx.mapreduce.splits import (
    FileSplit,
    Piece,
    Records,
    SequenceSplit,
    find_files,
    names_files,
    plan_file_splits,
    plan_sequence_splits,
)

TEXTS = [
    b"",
    b"\n",
    b"\n\n\n",
    b"a",
    b"a\n",
    b"a\nb",
    b"ab\r\ncd\r\n\r\nef",
    b"one\rstill one\ntwo\r\n",
    b"x" * 40 + b"\n" + b"yy\n" + b"z" * 25,
    "ä ö\nü €\n😀\n".encode(),
]


def lines_of(data):
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
        return [line.removesuffix(b"\r") for line in lines]
    return [line.removesuffix(b"\r") for line in lines[:-1]] + lines[-1:]


def read(splits, encoding="utf-8", block_bytes=8, sequence=None):
    return [list(read_blocks(split, sequence, encoding, block_bytes)) for split in splits]


def records(blocks_of_splits):
    return [item for blocks in blocks_of_splits for block in blocks for item in block.items]


@pytest.mark.parametrize("block_bytes", [1, 3, 8, 1000])
def test_a_border_at_any_byte_loses_no_line_and_gives_none_twice(tmp_path, block_bytes):
    path = tmp_path / "text"
    for data in TEXTS:
        path.write_bytes(data)
        want = [line.decode() for line in lines_of(data)]
        for border in range(1, len(data)):
            splits = [FileSplit((Piece(str(path), 0, border),)), FileSplit((Piece(str(path), border, len(data)),))]
            first, second = read(splits, block_bytes=block_bytes)
            assert records([first]) + records([second]) == want, (data, border)
            for block in first:
                assert all(int(block.locate(i).rpartition(" ")[2]) < border for i in range(len(block.items)))
        for split_bytes in range(1, 12):
            splits = plan_file_splits([(str(path), len(data))], split_bytes)
            assert records(read(splits, block_bytes=block_bytes)) == want


def test_random_files_of_random_sizes_in_random_splits_are_read_as_they_are(tmp_path):
    rng = random.Random(7)
    for _ in range(60):
        files, want = [], []
        for number in range(rng.randrange(1, 5)):
            data = b"".join(
                bytes(rng.choice(b"ab \r") for _ in range(rng.randrange(12))) + rng.choice([b"\n", b"\r\n"])
                for _ in range(rng.randrange(8))
            )
            data = data[: len(data) - rng.randrange(3)]
            path = tmp_path / f"{number}"
            path.write_bytes(data)
            files.append((str(path), len(data)))
            want += [line.decode() for line in lines_of(data)]
        splits = plan_file_splits(files, rng.randrange(1, 30))
        assert records(read(splits, block_bytes=rng.randrange(1, 20))) == want
        assert records(read(splits, encoding=None)) == [line.encode() for line in want]


def test_where_a_record_lies_is_told_by_its_first_byte(tmp_path):
    data = "é\r\nsecond\n\nfourth".encode()
    path = tmp_path / "text"
    path.write_bytes(data)
    [blocks] = read(plan_file_splits([(str(path), len(data))], 1000), block_bytes=1000)
    assert [block.locate(i) for block in blocks for i in range(len(block.items))] == [
        f"{path}, byte {at}" for at in (0, 4, 11, 12)
    ]


def test_a_line_that_cannot_be_decoded_is_bad_and_the_others_are_not(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"good\n\xff\xfe bad\r\n\xc3\xa9\nend \xe2\x82")
    [blocks] = read(plan_file_splits([(str(path), path.stat().st_size)]), block_bytes=1000)
    assert records([blocks]) == ["good", "é"]
    assert [(where, line) for block in blocks for where, line, _ in block.bad] == [
        (f"{path}, byte 5", b"\xff\xfe bad"),
        (f"{path}, byte 16", b"end \xe2\x82"),
    ]
    assert blocks[0].locate(1) == f"{path}, byte 13"


def test_compressed_files_are_read_as_what_is_in_them(tmp_path):
    data = b"one\ntwo\r\nthree"
    files = []
    for suffix, compress in ((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)):
        path = tmp_path / f"text{suffix}"
        path.write_bytes(compress(data))
        files.append((str(path), path.stat().st_size))
    for split_bytes in (1, 1000):
        assert records(read(plan_file_splits(files, split_bytes))) == ["one", "two", "three"] * 3


def test_plans_of_splits():
    assert plan_file_splits([("a", 5), ("b", 0), ("c", 4)], 3) == [
        FileSplit((Piece("a", 0, 3),)),
        FileSplit((Piece("a", 3, 5), Piece("c", 0, 1))),
        FileSplit((Piece("c", 1, 4),)),
    ]
    assert plan_file_splits([("a.gz", 9), ("b", 1)], 4) == [
        FileSplit((Piece("a.gz", 0, None),)),
        FileSplit((Piece("b", 0, 1),)),
    ]
    assert plan_file_splits([]) == []
    assert len(plan_file_splits([("a", 1 << 30)])) == 32
    assert plan_sequence_splits(5, 2) == [SequenceSplit(0, 2), SequenceSplit(2, 4), SequenceSplit(4, 5)]
    assert plan_sequence_splits(0) == []
    assert len(plan_sequence_splits(100)) > 16  # few records that take long are spread, too


def test_files_are_found_by_name_pattern_and_list(tmp_path):
    for name in ("b.txt", "a.txt", "[x].txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder.txt").mkdir()
    names = [name.rpartition("/")[2] for name, _ in find_files(tmp_path / "*.txt")]
    assert names == ["[x].txt", "a.txt", "b.txt"]
    assert [size for _, size in find_files([str(tmp_path / "[x].txt"), tmp_path / "b.txt"])] == [7, 5]
    with pytest.raises(FileNotFoundError, match=r"there is no file 'nowhere'\n  no file matches 'no\*where'\nIf these"):
        find_files(["nowhere", "no*where"])
    with pytest.raises(ValueError, match=r"is not a regular file. For a folder pass a pattern"):
        find_files(tmp_path)


def test_what_names_files_and_what_is_records(tmp_path):
    assert names_files("a")
    assert names_files(tmp_path)
    assert names_files(["a", tmp_path])
    assert not names_files([1, "a"])
    assert not names_files([])
    assert not names_files(range(3))
    assert not names_files(Records(["a"]))
    for wrong in ({1, 2}, b"abc", iter([1]), 5):
        with pytest.raises(TypeError, match="Give a path, a pattern"):
            names_files(wrong)
