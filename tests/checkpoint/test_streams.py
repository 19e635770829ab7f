"""The checksum of a file is that of its bytes, though torch.save has computed most of it, record by record."""

import io
import random
import zlib

import pytest
import torch

from phalanx.checkpoint import CheckpointManager
from phalanx.checkpoint.checksum import Crc32, crc32_of_range
from phalanx.checkpoint.streams import ChecksummedStream, DiskStream, FileRange
from phalanx.errors import CheckpointError
from phalanx.testing import run_ranks

RECORD = 1 << 18  # from here on a record's own checksum is taken


@pytest.mark.parametrize("has_core", [True, False])
def test_the_checksum_of_a_range_is_that_of_zlib(new_file, effort, has_core, monkeypatch):
    if not has_core:
        monkeypatch.setattr("phalanx._core.crc32_is_fast", lambda: False)
    drawn = random.Random(7)
    data = drawn.randbytes((1 << 18) + 1000)  # more than the core reads at a time
    new_file.write(data)
    new_file.flush()
    for _ in range(50 * effort):
        begin = drawn.choice([0, 1, drawn.randrange(len(data) + 10)])
        nbytes = drawn.choice([drawn.randrange(300), drawn.randrange(1 << 18), 1 << 20])
        assert crc32_of_range(new_file, begin, nbytes) == zlib.crc32(data[begin : begin + nbytes])


@pytest.mark.parametrize("seed", range(20))
def test_a_checksum_of_parts_is_that_of_the_whole(seed):
    drawn = random.Random(seed)
    parts = [drawn.randbytes(drawn.choice([0, 1, 3, 64, 1000, 1 << 20])) for _ in range(6)]
    whole = Crc32()
    for part in parts:
        if drawn.random() < 0.5:
            whole.update(part)
        else:
            whole.extend(zlib.crc32(part), len(part))
    assert whole.value == zlib.crc32(b"".join(parts))


@pytest.fixture
def new_file(tmp_path):
    with (tmp_path / "state.pt").open("x+b") as file:
        yield file


def _written(file):
    file.flush()
    file.seek(0)
    return file.read()


@pytest.mark.parametrize("compute_crc32", [True, False], ids=["with-checksums", "without"])
@pytest.mark.parametrize("numels", [[5], [RECORD // 4 - 1], [RECORD // 4], [3, 300_000, 0, 70_000, 1, 5_000_000]])
def test_the_checksum_of_what_torch_saves_is_that_of_the_file(new_file, numels, compute_crc32):
    stream = ChecksummedStream(new_file)
    torch.manual_seed(0)
    torch.serialization.set_crc32_options(compute_crc32)
    try:
        for _ in range(2):  # a shard of torch.distributed.checkpoint has such files one behind the other
            torch.save({number: torch.rand(numel) for number, numel in enumerate(numels)}, stream)
    finally:
        torch.serialization.set_crc32_options(True)
    content = _written(new_file)
    assert (stream.nbytes, stream.crc32) == (len(content), zlib.crc32(content))


def _footer(crc, nbytes, *, size=4, packed=None):
    sizes = [(nbytes if packed is None else packed), nbytes]
    return b"PK\x07\x08" + crc.to_bytes(4, "little") + b"".join(n.to_bytes(size, "little") for n in sizes)


def test_what_only_looks_like_the_end_of_a_record_is_not_believed(new_file):
    record, stream = random.Random(0).randbytes(RECORD + 5), ChecksummedStream(new_file)
    for written in (
        record,  # nothing follows but another one
        record,
        _footer(1, len(record) - 1),  # another length
        record,
        _footer(1, len(record), packed=9),
        record,
        b"PK\x07\x09" + bytes(12),
        record,
        _footer(zlib.crc32(record), len(record), size=8),  # a large file has sizes of eight bytes
        _footer(1, len(record)),  # there is no record before it
        record,
    ):
        stream.write(written)
    content = _written(new_file)
    assert stream.crc32 == zlib.crc32(content)


def test_a_record_is_not_read_again_for_its_checksum(new_file, monkeypatch):
    """It takes as long as to write it."""
    monkeypatch.setattr("phalanx.checkpoint.streams.crc32_of_range", None)
    stream = ChecksummedStream(new_file)
    torch.save(torch.rand(1_000_000), stream)
    assert stream.crc32 == zlib.crc32(_written(new_file))


def test_the_disk_begins_to_write_while_the_file_is_still_written(new_file, monkeypatch):
    """It began when all was written, and whoever saved waited for all of it."""
    begun = []
    monkeypatch.setattr("phalanx._core.start_writeback", lambda fd, at, nbytes: begun.append((at, nbytes)))
    stream = DiskStream(new_file)
    for _ in range(5):
        stream.write(bytes(10 << 20))
    assert begun == [(0, 20 << 20), (20 << 20, 20 << 20)]


@pytest.mark.parametrize("at", [0.1, 0.4, 0.6, 0.9])
def test_each_rank_compares_a_share_of_the_file_and_all_hear_of_a_flipped_bit(tmp_path, at):
    CheckpointManager(tmp_path).save(1, {"weight": torch.rand(100_000)})
    (file,) = tmp_path.rglob("state.pt")
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 1
    file.write_bytes(content)

    def load(rank, world_size):
        with pytest.raises(CheckpointError, match="does not match its checksum"):
            CheckpointManager(tmp_path).load()

    run_ranks(load, 2)


@pytest.mark.parametrize("seed", range(5))
def test_a_part_of_a_file_reads_as_a_file_of_its_own(new_file, seed):
    drawn = random.Random(seed)
    content = drawn.randbytes(10_000)
    new_file.write(content)
    new_file.flush()
    begin, nbytes = drawn.randrange(9_000), drawn.randrange(900)
    expected, found = io.BytesIO(content[begin : begin + nbytes]), FileRange(new_file, begin, nbytes)
    for _ in range(50):
        length, target = drawn.choice([-1, 0, 1, 10, 500]), drawn.randrange(nbytes + 10)
        assert found.seek(target) == expected.seek(target)
        assert found.read(length) == expected.read(length)
        assert found.tell() == expected.tell()
        assert found.seek(-min(nbytes, 7), io.SEEK_END) == expected.seek(-min(nbytes, 7), io.SEEK_END)
        assert found.readline() == expected.readline()
        assert found.seek(1, io.SEEK_CUR) == expected.seek(1, io.SEEK_CUR)
        buffers = bytearray(40), bytearray(40)
        assert found.readinto(buffers[0]) == expected.readinto(buffers[1])
        assert buffers[0] == buffers[1]
