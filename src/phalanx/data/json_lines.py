"""Read shards of JSON lines: text files in which each line is a sample."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phalanx._base.storage import open_for_reading
from phalanx.data.stream import Stream, UnreadableSample, list_paths
from phalanx.errors import summary_of


def from_json_lines(
    files: Sequence[str | os.PathLike[str]],
    *,
    loads: Callable[[bytes], Any] = json.loads,
    transform: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Stream:
    """Return a stream over local or remote files of JSON lines; `.gz`, `.bz2` and `.xz` are decompressed.

    Arguments:
        loads: parses a line. Blank lines are not samples.
        transform: applied to the result of `loads`.
        options: options of `Stream`. Without `lengths`, the lines are counted.

    Cost: files are read in sequence; a skipped line is read, but not parsed.

    Raises:
        TypeError: `files` is one path.
        DataError: as for `Stream`; also later, if `loads` fails on a line. The message gives the file, and the sample's
            number in it, from 0.
    """
    names = list_paths("from_json_lines", files)
    parse = _Parse(loads) if transform is None else _Compose(_Parse(loads), transform)
    return Stream(names, Lines, count=_count, transform=parse, **options)


class _Parse:
    """`_Parse` calls `loads`, and raises its errors as `UnreadableSample`, to which the stream adds the place."""

    def __init__(self, loads: Callable[[bytes], Any]) -> None:
        self._loads = loads

    def __call__(self, line: bytes) -> Any:
        try:
            return self._loads(line)
        except Exception as error:  # any error of the user's function
            raise UnreadableSample(summary_of(error)) from error


class _Compose:
    """`_Compose` calls two functions one after the other, and can be pickled for a spawned worker."""

    def __init__(self, first: Callable[[Any], Any], second: Callable[[Any], Any]) -> None:
        self._first, self._second = first, second

    def __call__(self, value: Any) -> Any:
        return self._second(self._first(value))


class Lines(Iterator[bytes]):
    """`Lines` iterates over the lines of a file that are not blank."""

    def __init__(self, name: str) -> None:
        self._file = open_for_reading(name, compression="infer")
        self._lines = filter(bytes.strip, self._file)

    def __next__(self) -> bytes:
        return next(self._lines)

    def skip(self, count: int) -> None:
        next(itertools.islice(self._lines, count - 1, None), None)

    def close(self) -> None:
        self._file.close()


def _count(name: str) -> int:
    lines = Lines(name)
    try:
        return sum(1 for _ in lines._lines)
    finally:
        lines.close()
