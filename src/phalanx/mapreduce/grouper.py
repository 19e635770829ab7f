"""Values by key, in the order of the keys: in memory as long as they fit, else in sorted runs on disk that are merged.

    buckets of task 0, 1, 2 … ──▶ dict of lists ──▶ sorted run 0 ─┐
                                       │ full      sorted run 1 ─┼─▶ merge ─▶ (key, values), key after key
                                       └─────────▶ sorted run 2 ─┘

Values of a key keep the order in which their buckets were added: runs are merged in the order in which they were made.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any

from phalanx.mapreduce.columns import pack, unpack
from phalanx.mapreduce.sizes import size_of, size_of_table
from phalanx.mapreduce.spool import Extent, Spool

_FAN_IN = 16
_BLOCK_BYTES = 64 << 10
_VALUES = 1024  # of a key, in one entry of a run
_first = itemgetter(0)

Run = list[Extent]


def write_blocks(spool: Spool, pairs: Iterable[tuple[Any, Any]], *, listed: bool = False) -> Run:
    """Write pairs in blocks of some tens of KiB, so that who reads them holds one at a time."""
    run: Run = []
    size, rest = 16, iter(pairs)
    while block := list(islice(rest, size)):
        keys, values = zip(*block, strict=True)
        run.append(spool.append(pack(keys, values, listed=listed)))
        if run[-1].length < _BLOCK_BYTES // 2:
            size *= 2
        elif run[-1].length > _BLOCK_BYTES * 2:
            size = max(1, size // 2)
    return run


def read_blocks(spool: Spool, run: Run) -> Iterator[tuple[Any, Any]]:
    """The pairs again."""
    for offset, length in run:
        yield from zip(*unpack(spool.read(offset, length)), strict=True)


class Grouper:
    """Collects the buckets of one partition. `listed`: the values of a bucket are lists of values.

    `adds`: integers of a key may be added up at once, which is exact in any order, and a sum takes the least room.
    """

    def __init__(self, spool: Spool, limit_bytes: int, *, listed: bool, adds: bool = False) -> None:
        self._spool = spool
        self._limit_bytes = limit_bytes
        self._listed = listed
        self._adds = adds and not listed
        self._values: dict[Any, Any] = {}  # lists, and sums that are no list
        self._added = 0
        self._next_look = 1024
        self._runs: list[tuple[int, Run]] = []  # with how often they were merged

    def add(self, keys: list[Any], values: list[Any]) -> None:
        """What one bucket holds.

        Raises:
            TypeError: two keys cannot be compared.
        """
        if self._listed:
            self._extend(keys, values)
        elif self._adds and set(map(type, values)) == {int}:
            self._add_up(keys, values)
        else:
            self._append(keys, values)
        if self._added >= self._next_look:
            held = self._size()
            if held >= self._limit_bytes:
                self._spill()
            else:
                room = (self._limit_bytes - held) / (held / self._added)
                self._next_look = self._added + max(64, min(self._added, int(room / 2)))

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

    def _size(self) -> int:
        step = max(1, len(self._values) // 64)
        sample = [size_of(_last(value)) + 9 for value in list(self._values.values())[::step]]
        return size_of_table(self._values, 0) + self._added * sum(sample) // max(1, len(sample))

    def groups(self) -> Iterator[tuple[Any, Iterator[Any]]]:
        """Every key with its values, in the order of the keys. Once.

        Raises:
            TypeError: two keys cannot be compared.
        """
        values = self._values
        if not self._runs:
            for key in _sorted(values):
                value = values.pop(key)
                yield key, iter(value if type(value) is list else (value,))
            return
        self._spill()
        streams = [read_blocks(self._spool, run) for _, run in self._runs]
        for key, entries in groupby(heapq.merge(*streams, key=_first), key=_first):
            yield key, chain.from_iterable(listed for _, listed in entries)

    def _spill(self) -> None:
        values, self._values = self._values, {}
        self._added, self._next_look = 0, 1024
        if values:
            self._runs.append((0, write_blocks(self._spool, _entries(values), listed=True)))
        while len(self._runs) >= _FAN_IN and self._runs[-1][0] == self._runs[-_FAN_IN][0]:
            level = self._runs[-1][0]
            streams = [read_blocks(self._spool, run) for _, run in self._runs[-_FAN_IN:]]
            del self._runs[-_FAN_IN:]
            self._runs.append((level + 1, write_blocks(self._spool, heapq.merge(*streams, key=_first), listed=True)))


def _last(value: Any) -> Any:
    return value[-1] if type(value) is list else value


def _entries(values: dict[Any, Any]) -> Iterator[tuple[Any, list[Any]]]:
    for key in _sorted(values):
        value = values.pop(key)
        listed = value if type(value) is list else [value]
        for start in range(0, len(listed), _VALUES):
            yield key, listed[start : start + _VALUES]


def _sorted(values: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError as error:
        raise TypeError(
            f"map_reduce: keys cannot be sorted: {error}.\n"
            "Let map yield keys that can be compared with each other; in tuples, item by item."
        ) from None
