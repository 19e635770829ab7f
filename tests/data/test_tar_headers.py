"""The files of an archive are those that `tarfile` finds, whatever has written it."""

from __future__ import annotations

import io
import os
import random
import tarfile

import pytest

from phalanx.data.webdataset import list_files


def files_of(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        return list(list_files(fd))
    finally:
        os.close(fd)


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_the_files_are_those_of_tarfile(tmp_path, format):
    for seed in range(20):
        draw = random.Random(seed)
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w", format=format) as tar:
            for number in range(draw.randint(0, 12)):
                longest = 12 if format == tarfile.USTAR_FORMAT else 40
                name = "/".join("folder é"[: draw.randint(1, 8)] for _ in range(draw.randint(0, longest)))
                member = tarfile.TarInfo(f"{name}/{number:03}.jpg")
                kind = draw.choice(("file", "file", "file", "folder", "link"))
                member.type = {"file": tarfile.REGTYPE, "folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}[kind]
                member.linkname = "x" * draw.choice((3, 90)) if kind == "link" else ""
                member.mtime = draw.choice((0, 12.5)) if format == tarfile.PAX_FORMAT else 0
                data = draw.randbytes(draw.choice((0, 1, 511, 512, 513, 5000))) if kind == "file" else b""
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        with tarfile.open(path) as tar:
            expected = [(member.name, member.offset_data, member.size) for member in tar if member.isreg()]
        assert files_of(path) == expected


def test_what_is_no_archive_or_is_cut_off_is_said(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(b"no archive" * 100)
    with pytest.raises(tarfile.ReadError):
        files_of(path)
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("a.txt")
        member.size = 2000
        tar.addfile(member, io.BytesIO(b"x" * 2000))
    os.truncate(path, 1000)
    with pytest.raises(tarfile.ReadError, match="it is truncated: 1512 bytes of a member are missing"):
        files_of(path)
    path.write_bytes(b"")
    assert files_of(path) == []


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("damage", ["magic", "cut"])
def test_a_damaged_header_is_not_the_end_of_the_archive(tmp_path, format, damage):
    """The samples behind it were lost silently."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=format) as tar:
        for number in range(4):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = 100
            tar.addfile(member, io.BytesIO(b"x" * 100))
    with path.open("r+b") as file:
        if damage == "cut":
            file.truncate(2 * 1024 + 200)
        else:
            file.seek(2 * 1024 + 257)
            file.write(b"?????")
    with pytest.raises(tarfile.ReadError, match="bad header at byte 2048"):
        files_of(path)
