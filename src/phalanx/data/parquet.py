"""Read Parquet files as shards, one row group at a time."""

from __future__ import annotations

import bisect
import itertools
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from phalanx._base.extras import require
from phalanx._base.storage import open_for_reading
from phalanx.data.stream import Stream, list_paths

_GROUPS_CACHED = 2  # a window may span two


def from_parquet(
    files: Sequence[str | os.PathLike[str]], *, columns: Sequence[str] | None = None, **options: Any
) -> Stream:
    """Return a stream over local or remote Parquet files; a sample is a row, a dict by column.

    Arguments:
        columns: the columns to read; None for all.
        options: options of `Stream`. Default `lengths` come from the files' footers, read from sixteen files at a time.

    Cost: a row group is decoded when one of its rows is requested; each open file keeps two decoded groups.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
        TypeError: `files` is one path.
    """
    require("pyarrow.parquet", extra="data", what="from_parquet")
    names = list_paths("from_parquet", files)
    return Stream(names, _Read(None if columns is None else list(columns)), count=_count, **options)


class _Read:
    def __init__(self, columns: list[str] | None) -> None:
        self._columns = columns

    def __call__(self, name: str) -> ParquetShard:
        return ParquetShard(name, self._columns)


class ParquetShard:
    """`ParquetShard` reads rows of a file by number."""

    def __init__(self, name: str, columns: list[str] | None) -> None:
        self._source = open_for_reading(name)
        self._file = require("pyarrow.parquet", extra="data", what="from_parquet").ParquetFile(self._source)
        self._columns = columns
        metadata = self._file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._ends = list(itertools.accumulate(sizes))
        self._groups: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows, decoding each of their row groups at most once."""
        rows: list[Any] = [None] * len(numbers)
        of_groups = [bisect.bisect_right(self._ends, number) for number in numbers]
        for group in dict.fromkeys(of_groups):
            places = [place for place, one in enumerate(of_groups) if one == group]
            begin = self._ends[group - 1] if group else 0
            table = self._group(group).take([numbers[place] - begin for place in places])
            for place, row in zip(places, table.to_pylist(), strict=True):
                rows[place] = row
        return rows

    def _group(self, number: int) -> Any:
        if number not in self._groups:
            while len(self._groups) >= _GROUPS_CACHED:
                self._groups.popitem(last=False)
            self._groups[number] = self._file.read_row_group(number, columns=self._columns, use_threads=False)
        self._groups.move_to_end(number)
        return self._groups[number]

    def close(self) -> None:
        """Close the file, and release the decoded row groups."""
        self._groups.clear()
        self._file.close()
        self._source.close()


def _count(name: str) -> int:
    with open_for_reading(name) as source:
        rows: int = require("pyarrow.parquet", extra="data", what="from_parquet").read_metadata(source).num_rows
        return rows
