"""Values by key, in the order of the keys: in memory as long as they fit, else in sorted runs on disk that are merged.

    buckets of task 0, 1, 2 … ──▶ dict of lists ──▶ sorted run 0 ─┐
                                       │ full      sorted run 1 ─┼─▶ merge ─▶ (key, values), key after key
                                       └─────────▶ sorted run 2 ─┘

Values of a key keep the order in which their buckets were added: runs are merged in the order in which they were made.
"""

from __future__ import annotations

import heapq
import pickle
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any

from phalanx.mapreduce.sizes import size_of, size_of_table
from phalanx.mapreduce.spool import Extent, Spool

_FAN_IN = 16
_BLOCK_BYTES = 64 << 10
_VALUES = 1024  # of a key, in one entry of a run
_first = itemgetter(0)

Run = list[Extent]


def write_blocks(spool: Spool, pairs: Iterable[tuple[Any, Any]]) -> Run:
    """Write pairs in blocks of some tens of KiB, so that who reads them holds one at a time."""
    run: Run = []
    size, rest = 16, iter(pairs)
    while block := list(islice(rest, size)):
        run.append(spool.append(pickle.dumps(block, protocol=5)))
        if run[-1].length < _BLOCK_BYTES // 2:
            size *= 2
        elif run[-1].length > _BLOCK_BYTES * 2:
            size = max(1, size // 2)
    return run


def read_blocks(spool: Spool, run: Run) -> Iterator[tuple[Any, Any]]:
    """The pairs again."""
    for offset, length in run:
        yield from pickle.loads(spool.read(offset, length))


class Grouper:
    """Collects the buckets of one partition. `listed`: the values of a bucket are lists of values."""

    def __init__(self, spool: Spool, limit_bytes: int, *, listed: bool) -> None:
        self._spool = spool
        self._limit_bytes = limit_bytes
        self._listed = listed
        self._values: dict[Any, list[Any]] = {}
        self._added = 0
        self._next_look = 1024
        self._runs: list[tuple[int, Run]] = []  # with how often they were merged

    def add(self, keys: list[Any], values: list[Any]) -> None:
        """What one bucket holds.

        Raises:
            TypeError: two keys cannot be compared.
        """
        groups = self._values
        get = groups.get
        if self._listed:
            for key, listed in zip(keys, values, strict=True):
                old = get(key)
                if old is None:
                    groups[key] = listed
                else:
                    old.extend(listed)
                self._added += len(listed)
        else:
            for key, value in zip(keys, values, strict=True):
                old = get(key)
                if old is None:
                    groups[key] = [value]
                else:
                    old.append(value)
            self._added += len(keys)
        if self._added >= self._next_look:
            held = self._size()
            if held >= self._limit_bytes:
                self._spill()
            else:
                room = (self._limit_bytes - held) / (held / self._added)
                self._next_look = self._added + max(64, min(self._added, int(room / 2)))

    def _size(self) -> int:
        step = max(1, len(self._values) // 64)
        sample = [size_of(value[-1]) + 9 for value in list(self._values.values())[::step]]
        return size_of_table(self._values, 0) + self._added * sum(sample) // max(1, len(sample))

    def groups(self) -> Iterator[tuple[Any, Iterator[Any]]]:
        """Every key with its values, in the order of the keys. Once.

        Raises:
            TypeError: two keys cannot be compared.
        """
        values = self._values
        if not self._runs:
            for key in _sorted(values):
                yield key, iter(values.pop(key))
            return
        self._spill()
        streams = [read_blocks(self._spool, run) for _, run in self._runs]
        for key, entries in groupby(heapq.merge(*streams, key=_first), key=_first):
            yield key, chain.from_iterable(listed for _, listed in entries)

    def _spill(self) -> None:
        values, self._values = self._values, {}
        self._added, self._next_look = 0, 1024
        if values:
            self._runs.append((0, write_blocks(self._spool, _entries(values))))
        while len(self._runs) >= _FAN_IN and self._runs[-1][0] == self._runs[-_FAN_IN][0]:
            level = self._runs[-1][0]
            streams = [read_blocks(self._spool, run) for _, run in self._runs[-_FAN_IN:]]
            del self._runs[-_FAN_IN:]
            self._runs.append((level + 1, write_blocks(self._spool, heapq.merge(*streams, key=_first))))


def _entries(values: dict[Any, list[Any]]) -> Iterator[tuple[Any, list[Any]]]:
    for key in _sorted(values):
        listed = values.pop(key)
        for start in range(0, len(listed), _VALUES):
            yield key, listed[start : start + _VALUES]


def _sorted(values: dict[Any, list[Any]]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError as error:
        raise TypeError(
            f"map_reduce: keys cannot be sorted: {error}.\n"
            "Let map yield keys that can be compared with each other; in tuples, item by item."
        ) from None
