"""Plan the inputs of map tasks: byte ranges of files, cut anywhere, or ranges of positions of a sequence.

    files    a.txt                       b.txt    c.txt.gz
             |-----------|-----------|---|-----|  |------|
    splits   0           1           2            3          a compressed file is read from its beginning

Files are cut by bytes, regardless of lines: a task reads the lines that begin in its split.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

Item = TypeVar("Item", covariant=True)
COMPRESSED = (".gz", ".bz2", ".xz")

_LEAST_SPLIT_BYTES = 1 << 20
_MOST_SPLIT_BYTES = 32 << 20
_MOST_SPLIT_RECORDS = 1000
_USUAL_SPLITS = 32  # a small input has about this many, enough for most numbers of ranks


class Indexable(Protocol[Item]):
    """An `Indexable` is a sequence, such as a map-style PyTorch dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...


class Records(Generic[Item]):
    """`Records` marks a sequence as records, not names of files, even if they are strings or paths."""

    def __init__(self, items: Indexable[Item]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int, /) -> Item:
        return self._items[index]


@dataclass(frozen=True)
class Piece:
    """A `Piece` is the bytes from `start` to `stop` of a file, or a whole compressed file if `stop` is None."""

    path: str
    start: int
    stop: int | None


@dataclass(frozen=True)
class FileSplit:
    """A `FileSplit` has pieces of one or several files."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class SequenceSplit:
    """A `SequenceSplit` has the positions from `start` to `stop` of the sequence."""

    start: int
    stop: int


Split = FileSplit | SequenceSplit


def names_files(inputs: Any) -> bool:
    """Return whether `inputs` names files (a path, a pattern, or a list of these) or else is a sequence of records.

    Raises:
        TypeError: `inputs` is neither.
    """
    if isinstance(inputs, str | os.PathLike):
        return True
    if isinstance(inputs, list | tuple) and inputs and all(isinstance(one, str | os.PathLike) for one in inputs):
        return True
    if isinstance(inputs, Mapping):
        raise TypeError(
            f"map_reduce: inputs is a {type(inputs).__name__}, whose items have no positions to divide between ranks. "
            "Give list(inputs.items()): a record is then a pair (key, value)."
        )
    if isinstance(inputs, bytes) or not (hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__")):
        raise TypeError(
            f"map_reduce: inputs is a {type(inputs).__name__}. Give a path, a pattern such as 'text/*.txt', a list of "
            "those, or a sequence of records (with len() and [index])."
        )
    return False


def find_files(inputs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[tuple[str, int]]:
    """Return the files that `inputs` names, with their sizes, in the order given; matches of a pattern are sorted.

    Raises:
        FileNotFoundError: a path or pattern matches no file.
        ValueError: a path is a folder or a device.
    """
    found: list[str] = []
    problems = []
    for one in [inputs] if isinstance(inputs, str | os.PathLike) else inputs:
        name = os.fspath(one)
        if not os.path.exists(name) and glob.has_magic(name):
            matches = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
            if not matches:
                problems.append(f"no file matches {name!r}")
            found += matches
        elif not os.path.exists(name):
            problems.append(f"there is no file {name!r}")
        else:
            found.append(name)
    if problems:
        listed = "\n  ".join(problems[:8])
        raise FileNotFoundError(
            f"map_reduce: {listed}\nIf these are records and not files, pass phalanx.mapreduce.Records([...])."
        )
    if others := [name for name in found if not os.path.isfile(name)]:
        raise ValueError(
            f"map_reduce: {others[0]!r} is not a regular file. For a folder pass a pattern: 'folder/*.txt'."
        )
    return [(os.path.abspath(name), os.path.getsize(name)) for name in found]


def plan_file_splits(files: Sequence[tuple[str, int]], split_bytes: int | None = None) -> list[FileSplit]:
    """Cut files of these sizes into splits of `split_bytes` each, the last one shorter.

    Small files share a split, and compressed files are not cut. The plan does not depend on the ranks, so neither do
    the results.
    """
    total = sum(size for _, size in files)
    span = split_bytes or min(max(total // _USUAL_SPLITS, _LEAST_SPLIT_BYTES), _MOST_SPLIT_BYTES)
    splits: list[FileSplit] = []
    pieces: list[Piece] = []
    room = span

    def end() -> None:
        nonlocal pieces, room
        if pieces:
            splits.append(FileSplit(tuple(pieces)))
        pieces, room = [], span

    for path, size in files:
        if Path(path).suffix in COMPRESSED:
            if size > room:
                end()
            pieces.append(Piece(path, 0, None))
            room -= size
            if room <= 0:
                end()
            continue
        start = 0
        while start < size:
            stop = min(start + room, size)
            pieces.append(Piece(path, start, stop))
            room -= stop - start
            start = stop
            if room <= 0:
                end()
    end()
    return splits


def plan_sequence_splits(length: int, split_records: int | None = None) -> list[SequenceSplit]:
    """Cut the positions of a sequence into splits of `split_records` each, the last one shorter."""
    span = split_records or max(1, min(length // _USUAL_SPLITS, _MOST_SPLIT_RECORDS))
    return [SequenceSplit(start, min(start + span, length)) for start in range(0, length, span)]
