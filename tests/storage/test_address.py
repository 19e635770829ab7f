from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phalanx._base.storage import is_address, open_for_reading, place_of, split_address


def test_an_address_is_told_from_a_file_of_this_machine():
    assert all(map(is_address, ("s3://bucket/key", "memory://x", "gs://a", "github+x://a")))
    assert not any(map(is_address, ("/a/b", "a", "a:/b", "file:///a", "local://a", "a b://c", "")))


def test_a_place_is_an_address_or_a_path_of_this_machine():
    assert [*map(place_of, ("s3://a/b/", "file:///a/b", "local:///a", "a/b"))] == [
        "s3://a/b",
        Path("/a/b"),
        Path("/a"),
        Path("a/b"),
    ]


def test_both_are_opened_for_reading(tmp_path):
    (tmp_path / "a").write_bytes(b"here")
    files, path = split_address("memory://test-address/a")
    files.pipe_file(path, b"there")
    found = []
    for name in (tmp_path / "a", f"file://{tmp_path}/a", "memory://test-address/a"):
        with open_for_reading(name) as file:
            found.append(file.read())
    assert found == [b"here", b"here", b"there"]


def test_a_package_that_is_missing_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"the address s3://bucket/key needs s3fs, which is not installed: pip install 'phalanx\[s3\]'",
    ):
        split_address("s3://bucket/key")
