"""Group values by key, sorted by key: in memory while they fit, otherwise by merging sorted runs on disk.

    buckets of task 0, 1, 2 … ──▶ dict of lists ──▶ sorted run 0 ─┐
                                       │ full      sorted run 1 ─┼─▶ merge ─▶ (key, values), key after key
                                       └─────────▶ sorted run 2 ─┘

The values of a key keep the order in which their buckets were added, because runs are merged in order of creation.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from phalanx._base.malloc import release_freed_values
from phalanx.mapreduce.columns import HEADER, length_of_keys, pack, unpack, unpack_keys
from phalanx.mapreduce.sizes import cut_by_size, plan_next_check, quick_size, size_of_lists
from phalanx.mapreduce.spool import Spool, SpoolExtent
from phalanx.mapreduce.sums import new_sums, sorted_items

_FAN_IN = 16
_BLOCK_BYTES = 512 << 10
_VALUES = 1024  # the maximum number of a key's values in an entry of a run
_first = itemgetter(0)

Run = list[SpoolExtent]


class StoredValues:
    """`StoredValues` are the values of an entry that is larger than a block; iteration reads them from disk."""

    def __init__(self, spool: Spool, extent: SpoolExtent) -> None:
        self._spool = spool
        self._extent = extent

    def packed(self) -> bytes:
        return self._spool.read(*self._extent)

    def __iter__(self) -> Iterator[Any]:
        _, (values,) = unpack(self.packed())
        return iter(values)


def write_blocks(
    spool: Spool, pairs: Iterable[tuple[Any, Any]], block_bytes: int = _BLOCK_BYTES, *, listed: bool = False
) -> Run:
    """Write pairs in blocks that take about `block_bytes` of memory, so that a reader needs memory for one block.

    A larger pair is a block by itself.
    """
    run: Run = []
    keys: list[Any] = []
    values: list[Any] = []
    block_bytes = min(block_bytes, _BLOCK_BYTES)
    num_bytes = 0
    for key, value in pairs:
        stored = isinstance(value, StoredValues)
        size = block_bytes if stored else quick_size(key) + quick_size(value)
        if keys and num_bytes + size > block_bytes:
            run.append(spool.append(pack(keys, values, listed=listed)))
            keys, values, num_bytes = [], [], 0
        if stored:
            run.append(spool.append(value.packed()))
            continue
        keys.append(key)
        values.append(value)
        num_bytes += size
    if keys:
        run.append(spool.append(pack(keys, values, listed=listed)))
    return run


def read_blocks(spool: Spool, run: Run) -> Iterator[tuple[Any, Any]]:
    """Yield the pairs of a run."""
    for offset, length in run:
        yield from zip(*unpack(spool.read(offset, length)), strict=True)


def read_entries(spool: Spool, run: Run, block_bytes: int) -> Iterator[tuple[Any, Iterable[Any]]]:
    """Yield keys with their lists of values; a list larger than a block stays on disk until it is iterated over."""
    for extent in run:
        if extent.length > block_bytes:
            border = length_of_keys(spool.read(extent.offset, HEADER))
            keys = unpack_keys(spool.read(extent.offset, border))
            if len(keys) == 1:
                yield keys[0], StoredValues(spool, extent)
                continue
        yield from zip(*unpack(spool.read(*extent)), strict=True)


class Grouper:
    """`Grouper` collects the buckets of one partition. With `listed`, each value in a bucket is a list of values.

    With `adds`, the integers of a key are summed as they arrive, which saves memory and is exact in any order.
    """

    def __init__(self, spool: Spool, limit_bytes: int, *, listed: bool, adds: bool = False) -> None:
        self._spool = spool
        self._limit_bytes = limit_bytes
        self._listed = listed
        self._adds = adds and not listed
        self._values: dict[Any, Any] = {}  # lists of values, and plain sums
        self._sums = new_sums() if self._adds else None  # used until a bucket has pairs other than text with integers
        self._added = 0
        self._next_check = 1
        self._block_bytes = max(4096, min(limit_bytes // (2 * _FAN_IN), _BLOCK_BYTES))
        self._runs: list[tuple[int, Run]] = []  # each with its number of merges

    def add_packed(self, data: bytes) -> int:
        """Add the pairs of one packed bucket, and return its number of keys.

        Raises:
            TypeError: two keys cannot be compared.
        """
        if self._sums is not None:
            if count := self._sums.add(data):
                if self._sums.held_bytes() >= self._limit_bytes:
                    self._spill()
                return count
            self._spill()
            self._sums = None
        keys, values = unpack(data)
        self.add(keys, values)
        return len(keys)

    def add(self, keys: list[Any], values: list[Any]) -> None:
        """Add the pairs of one bucket.

        Raises:
            TypeError: two keys cannot be compared.
        """
        if self._listed:
            self._extend(keys, values)
        elif self._adds and set(map(type, values)) == {int}:
            self._add_up(keys, values)
        else:
            self._append(keys, values)
        if self._added >= self._next_check:
            used_bytes = size_of_lists(self._values)
            if used_bytes >= self._limit_bytes:
                count = self._added
                self._spill()
                release_freed_values(used_bytes, count)
            else:
                self._next_check = plan_next_check(
                    self._added, (self._limit_bytes - used_bytes) / (used_bytes / self._added)
                )

    def _extend(self, keys: list[Any], values: list[Any]) -> None:
        groups = self._values
        get = groups.get
        for key, listed in zip(keys, values, strict=True):
            old = get(key)
            if old is None:
                groups[key] = listed
            else:
                old.extend(listed)
            self._added += len(listed)

    def _append(self, keys: list[Any], values: list[Any]) -> None:
        groups = self._values
        get = groups.get
        for key, value in zip(keys, values, strict=True):
            old = get(key)
            if old is None:
                groups[key] = [value]
            elif type(old) is list:
                old.append(value)
            else:
                groups[key] = [old, value]
        self._added += len(keys)

    def _add_up(self, keys: list[Any], values: list[int]) -> None:
        groups = self._values
        get = groups.get
        before = len(groups)
        for key, value in zip(keys, values, strict=True):
            old = get(key)
            if old is None:
                groups[key] = value
            elif type(old) is list:
                old.append(value)
            else:
                groups[key] = old + value
        self._added += len(groups) - before

    def groups(self) -> Iterator[tuple[Any, Iterator[Any]]]:
        """Yield every key with its values, sorted by key. Call it once.

        Raises:
            TypeError: two keys cannot be compared.
        """
        values = self._values
        if not self._runs and self._sums:
            for key, value in sorted_items(self._sums):
                yield key, iter((value,))
            return
        if not self._runs:
            for key in _sorted(values):
                value = values.pop(key)
                yield key, iter(value if type(value) is list else (value,))
            return
        self._spill()
        streams = [read_entries(self._spool, run, self._block_bytes) for _, run in self._runs]
        for key, entries in groupby(heapq.merge(*streams, key=_first), key=_first):
            yield key, chain.from_iterable(listed for _, listed in entries)

    def _spill(self) -> None:
        values, self._values = self._values, {}
        self._added, self._next_check = 0, 1
        if self._sums:
            sums, self._sums = self._sums, new_sums()
            self._runs.append((0, self._write((key, [value]) for key, value in sorted_items(sums))))
        if values:
            self._runs.append((0, self._write(_entries(values, self._block_bytes))))
        while len(self._runs) >= _FAN_IN and self._runs[-1][0] == self._runs[-_FAN_IN][0]:
            level = self._runs[-1][0]
            streams = [read_entries(self._spool, run, self._block_bytes) for _, run in self._runs[-_FAN_IN:]]
            del self._runs[-_FAN_IN:]
            self._runs.append((level + 1, self._write(heapq.merge(*streams, key=_first))))

    def _write(self, entries: Iterable[tuple[Any, Iterable[Any]]]) -> Run:
        return write_blocks(self._spool, entries, self._block_bytes, listed=True)


def _entries(values: dict[Any, Any], block_bytes: int) -> Iterator[tuple[Any, list[Any]]]:
    for key in _sorted(values):
        value = values.pop(key)
        if type(value) is list and len(value) > 1:
            for some in cut_by_size(value, _VALUES, block_bytes // 2):
                yield key, some
        else:
            yield key, value if type(value) is list else [value]


def _sorted(values: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError as error:
        raise TypeError(
            f"map_reduce: keys cannot be sorted: {error}.\n"
            "Let map yield keys that can be compared with each other; in tuples, item by item."
        ) from None
