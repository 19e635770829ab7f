"""Each adapter hands out what the library of its format hands out of the same data, each sample once."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import sys
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import phalanx
from phalanx.data import Stream, from_datasets, from_json_lines, from_litdata, from_parquet, from_webdataset
from phalanx.data.webdataset import IndexedTar, read_tar
from phalanx.errors import DataError

pytest.importorskip("webdataset")
SIZES = (7, 1, 0, 20, 13)
ALL = list(range(sum(SIZES)))


def read_epoch(stream: Stream, *, ranks: int = 2, workers: int = 2, key: Any = None) -> list[Any]:
    """What all ranks get, in the middle of which they stop and go on as one rank more."""
    got: list[Any] = []
    state = None
    for count, steps in ((ranks, 2), (ranks + 1, None)):
        used = 0
        for rank in range(count):
            sampler = phalanx.DistributedSampler(stream, count, rank, padding=False)
            if state is not None:
                sampler.load_state_dict(state)
            loader = DataLoader(stream, 3, sampler=sampler, num_workers=workers, collate_fn=list)
            for number, batch in enumerate(loader):
                if number == steps:
                    break
                got += batch
                used = max(used, number + 1)
            if steps is not None:
                kept = sampler.state_dict(steps * 3)
        if steps is not None:
            state = kept
    return sorted(got, key=key)


@pytest.fixture(scope="module", autouse=True)
def _warm_libraries(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Start the threads that pyarrow and tqdm never end, before a test is watched for what it leaves."""
    pytest.importorskip("datasets")
    import pyarrow
    import tqdm

    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)

    tqdm.tqdm.monitor_interval = 0
    folder = tmp_path_factory.mktemp("warm")
    names = write_parquet(str(folder))[:2]
    import datasets
    import pyarrow.parquet

    pyarrow.parquet.read_table(names[0]).to_pylist()
    list(datasets.load_dataset("parquet", data_files=names, split="train", streaming=True))


def number_of(sample: Any) -> int:
    return int(sample["number"])


# -- webdataset --------------------------------------------------------------------------------------------------------


def write_tars(folder: Path, *, suffix: str = "") -> list[str]:
    """Samples of two files, one of which has a folder in its name; and files that webdataset passes over."""
    names, number = [], 0
    for shard, size in enumerate(SIZES):
        names.append(str(folder / f"shard-{shard}.tar{suffix}"))
        with tarfile.open(names[-1], f"w:{suffix.removeprefix('.')}") as tar:
            for name, data in (("__meta__", b"x"), ("__more__/a.txt", b"y"), ("no-extension", b"z")):
                add(tar, name, data)
            for _ in range(size):
                add(tar, f"part/{number:04}.JSON", json.dumps({"number": number}).encode())
                add(tar, f"part/{number:04}.seg.bin", bytes([number]) * (number * 100))
                number += 1
    return names


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def of_webdataset(names: list[str]) -> list[Any]:
    import webdataset

    urls = webdataset.SimpleShardList(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its files to the collector
        pipeline = webdataset.DataPipeline(urls, webdataset.tarfile_to_samples())
        return sorted(pipeline, key=lambda sample: sample["__key__"])


@pytest.mark.slow(but=("0-.gz",))
@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2"])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_tar_files_are_those_of_webdataset(tmp_path, suffix, workers):
    names = write_tars(tmp_path, suffix=suffix)
    stream = from_webdataset(names, window=5)
    assert stream.lengths.tolist() == list(SIZES)
    got = read_epoch(stream, workers=workers, key=lambda sample: sample["__key__"])
    assert [list(sample) for sample in got] == [list(sample) for sample in of_webdataset(names)]
    assert [drop_local(sample) for sample in got] == [drop_local(sample) for sample in of_webdataset(names)]
    assert isinstance(read_tar(names[0]), IndexedTar) == (suffix == "")


def drop_local(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name != "__local_path__"}


def test_tar_files_at_an_address_are_read_on_and_in_a_cache_by_index(tmp_path):
    import fsspec

    names = write_tars(tmp_path)
    files = fsspec.filesystem("memory")
    addresses = []
    for name in names:
        addresses.append(f"memory://test-formats/{os.path.basename(name)}")
        files.put_file(name, addresses[-1])
    expected = [drop_local(sample) | {"__url__": ""} for sample in of_webdataset(names)]
    got = read_epoch(from_webdataset(addresses), workers=0, key=lambda sample: sample["__key__"])
    assert [sample | {"__url__": ""} for sample in got] == expected


def test_webdatasets_own_notation_and_decoder_are_taken(tmp_path):
    import webdataset

    write_tars(tmp_path)
    decode = webdataset.autodecode.Decoder([webdataset.autodecode.basichandlers])
    stream = from_webdataset(f"{tmp_path}/shard-{{0..4}}.tar", transform=decode)
    theirs = webdataset.WebDataset(f"{tmp_path}/shard-{{0..4}}.tar", shardshuffle=False, empty_check=False).decode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        numbers = sorted(sample["json"]["number"] for sample in theirs)
    assert sorted(stream[i]["json"]["number"] for i in range(len(stream))) == numbers == ALL


def test_what_webdataset_opens_itself_it_still_opens(tmp_path):
    name = write_tars(tmp_path)[3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        stream = from_webdataset([f"pipe:cat {name}"])
        assert [json.loads(stream[i]["json"])["number"] for i in range(len(stream))] == ALL[8:28]


def test_a_tar_file_that_ends_early_is_named(tmp_path):
    name = write_tars(tmp_path)[3]
    stream = from_webdataset([name])
    os.truncate(name, os.path.getsize(name) // 2)
    with pytest.raises(DataError, match=r"shard 0, .*shard-3\.tar"):
        stream[19]


# -- Parquet and JSON lines --------------------------------------------------------------------------------------------


def write_parquet(folder: str, *, files: Any = None) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    names, begin = [], 0
    for shard, size in enumerate(SIZES):
        names.append(f"{folder}/shard-{shard}.parquet")
        numbers = list(range(begin, begin + size))
        texts = pyarrow.array([f"text {n}" for n in numbers], pyarrow.string())
        table = pyarrow.table({"number": pyarrow.array(numbers, pyarrow.int64()), "text": texts})
        out = io.BytesIO()
        pyarrow.parquet.write_table(table, out, row_group_size=4)
        put(names[-1], out.getvalue(), files)
        begin += size
    return names


def put(name: str, data: bytes, files: Any) -> None:
    if files is None:
        Path(name).write_bytes(data)
    else:
        files.pipe_file(name, data)


@pytest.fixture(params=["here", "at an address"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    if request.param == "here":
        yield str(tmp_path), None
        return
    import fsspec

    files = fsspec.filesystem("memory")
    yield f"memory://test-formats-{tmp_path.name}", files
    with contextlib.suppress(FileNotFoundError):
        files.rm(f"memory://test-formats-{tmp_path.name}", recursive=True)


@pytest.mark.slow(but=("at an address-None", "at an address-columns1", "here-columns1"))
@pytest.mark.parametrize("columns", [None, ["number"]])
def test_rows_of_parquet_files_are_those_of_pyarrow(place, columns):
    folder, files = place
    names = write_parquet(folder, files=files)
    import pyarrow.parquet

    theirs = []
    for name in names:
        source = io.BytesIO(Path(name).read_bytes() if files is None else files.cat_file(name))
        theirs += pyarrow.parquet.read_table(source, columns=columns).to_pylist()
    stream = from_parquet(names, columns=columns)
    assert stream.lengths.tolist() == list(SIZES)
    assert read_epoch(stream, workers=2 if files is None else 0, key=number_of) == theirs
    assert [stream[i] for i in ALL] == theirs


@pytest.mark.slow(but=("at an address-", "at an address-.gz", "here-.gz"))
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_lines_of_json_files_are_those_of_datasets(place, suffix):
    datasets = pytest.importorskip("datasets")
    folder, files = place
    names, begin = [], 0
    for shard, size in enumerate(SIZES):
        names.append(f"{folder}/shard-{shard}.jsonl{suffix}")
        lines = [json.dumps({"number": n, "text": f"{n}\n é"}) for n in range(begin, begin + size)]
        text = "\n\n".join(lines) + "\n" * (shard % 2)
        data = text.encode()
        put(names[-1], gzip.compress(data) if suffix else data, files)
        begin += size
    stream = from_json_lines(names, window=3)
    assert stream.lengths.tolist() == list(SIZES)
    got = read_epoch(stream, workers=2 if files is None else 0, key=number_of)
    if files is None:
        full = [name for name, size in zip(names, SIZES, strict=True) if size]
        theirs = list(datasets.load_dataset("json", data_files=full, split="train", streaming=True))
        assert got == theirs
    assert [row["number"] for row in got] == ALL


@pytest.mark.parametrize("make", [from_json_lines, from_parquet, from_webdataset, lambda files: Stream(files, list)])
@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_a_path_in_place_of_a_list_is_refused_with_the_list(tmp_path, make, kind):
    """Its letters were read as names: "the samples of shard / cannot be counted"."""
    if make is from_webdataset and kind is str:
        return  # webdataset's own notation
    given = kind(str(tmp_path / "a.jsonl"))
    with pytest.raises(TypeError, match=rf"must be a list, got the {type(given).__name__} .*a.jsonl.*: pass \[.*\]"):
        make(given)


def test_a_pattern_in_place_of_a_list_is_refused_with_its_glob():
    with pytest.raises(TypeError, match=r"pass sorted\(glob.glob\('data/\*.jsonl'\)\)"):
        from_json_lines("data/*.jsonl")


@pytest.mark.parametrize("transform", [None, number_of])
def test_a_line_that_is_no_json_is_named_with_its_file(tmp_path, transform):
    for name, lines in (("a", [b'{"number": 0}'] * 3), ("b", [b'{"number": 1}', b"", b"{broken"])):
        (tmp_path / name).write_bytes(b"\n".join(lines))
    stream = from_json_lines([tmp_path / "a", tmp_path / "b"], transform=transform)
    assert len(stream.__getitems__([0, 3])) == 2
    with pytest.raises(DataError, match=r"sample 1 of shard 1, .*/b, cannot be read: JSONDecodeError") as caught:
        stream[4]
    assert isinstance(caught.value.__cause__, json.JSONDecodeError)
    stream.close()


def test_what_a_users_transform_raises_is_left_as_it_is(tmp_path):
    (tmp_path / "a").write_bytes(b'{"number": 0}')
    stream = from_json_lines([tmp_path / "a"], transform=lambda row: row["absent"])
    with pytest.raises(KeyError, match="absent"):
        stream[0]
    stream.close()


def test_a_line_that_is_passed_over_is_not_parsed(tmp_path):
    parsed: list[bytes] = []
    (tmp_path / "a.jsonl").write_text("".join(f"{n}\n" for n in range(100)))
    stream = from_json_lines(
        [tmp_path / "a.jsonl"], window=10, loads=lambda line: parsed.append(line) or json.loads(line), transform=str
    )
    assert stream[57] == "57"
    assert parsed == [b"57\n"]


# -- Hugging Face datasets ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_of_a_table_are_those_of_datasets():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"number": ALL, "text": [f"text {n}" for n in ALL]})
    stream = from_datasets(table, rows_per_shard=7)
    assert stream.lengths.tolist() == [7, 7, 7, 7, 7, 6]
    assert read_epoch(stream, key=number_of) == list(table)
    tensors = from_datasets(table.with_format("torch"), rows_per_shard=7)
    assert torch.equal(tensors[40]["number"], table.with_format("torch")[40]["number"])


@pytest.mark.slow
def test_samples_of_a_streamed_dataset_are_those_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    names = [name for name, size in zip(write_parquet(str(tmp_path)), SIZES, strict=True) if size]
    streamed = datasets.load_dataset("parquet", data_files=names, split="train", streaming=True)
    streamed = streamed.map(lambda row: {"double": 2 * row["number"]})
    stream = from_datasets(streamed, window=4, index=tmp_path / "index.json")
    assert stream.lengths.tolist() == [size for size in SIZES if size]
    assert read_epoch(stream, key=number_of) == list(streamed)


def test_what_is_no_split_is_refused():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"number": [1]})
    with pytest.raises(TypeError, match=r"got a DatasetDict: pass one split, dataset\['train'\]"):
        from_datasets(datasets.DatasetDict(train=table))
    with pytest.raises(TypeError, match="got a list"):
        from_datasets([1])


# -- litData -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What litData writes: chunks of 6."""
    pytest.importorskip("litdata")
    from litdata.streaming.writer import BinaryWriter

    folder = tmp_path_factory.mktemp("optimized")
    writer = BinaryWriter(str(folder), chunk_size=6)
    for number in ALL:
        writer[number] = {"number": number, "tensor": torch.full((number,), number)}
    writer.done()
    writer.merge()
    return folder


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_an_optimized_dataset_are_those_of_litdata(optimized, workers):
    import litdata

    stream = from_litdata(optimized)
    assert stream.lengths.tolist() == [6, 6, 6, 6, 6, 6, 5]
    # In a process of its own: what litData has iterated over it holds open.
    theirs = list(DataLoader(litdata.StreamingDataset(str(optimized)), batch_size=None, num_workers=1))
    got = read_epoch(stream, workers=workers, key=number_of)
    assert [one["number"] for one in got] == [one["number"] for one in theirs] == ALL
    assert all(torch.equal(mine["tensor"], other["tensor"]) for mine, other in zip(got, theirs, strict=True))
    of_dataset = from_litdata(litdata.StreamingDataset(str(optimized), shuffle=True))
    assert [of_dataset[i]["number"] for i in ALL] == ALL


def test_a_folder_that_litdata_has_not_written_is_refused(tmp_path):
    pytest.importorskip("litdata")
    with pytest.raises(DataError, match="from_litdata: "):
        from_litdata(tmp_path)


# -- what is not installed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("webdataset", lambda: from_webdataset(["a.tar"], lengths=1)),
        ("pyarrow", lambda: from_parquet(["a.parquet"], lengths=1)),
        ("datasets", lambda: from_datasets(None)),
        ("litdata", lambda: from_litdata("a")),
    ],
)
def test_a_library_that_is_missing_is_named_with_the_extra(monkeypatch, package, call):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {package}, .* pip install 'phalanx\[data\]'"):
        call()
