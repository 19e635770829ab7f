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
from phalanx.mapreduce.sizes import plan_next_look, size_of, size_of_lists
from phalanx.mapreduce.spool import Extent, Spool
from phalanx.mapreduce.sums import new_sums, sorted_items

_FAN_IN = 16
_BLOCK_BYTES = 512 << 10
_VALUES = 1024  # of a key, in one entry of a run, at most
_first = itemgetter(0)

Run = list[Extent]


def write_blocks(
    spool: Spool, pairs: Iterable[tuple[Any, Any]], block_bytes: int = _BLOCK_BYTES, *, listed: bool = False
) -> Run:
    """Write pairs in blocks that hold about `block_bytes` as objects, so that who reads them holds one at a time."""
    run: Run = []
    block_bytes = min(block_bytes, _BLOCK_BYTES)
    size, rest = 1, iter(pairs)
    while block := list(islice(rest, size)):
        keys, values = zip(*block, strict=True)
        run.append(spool.append(pack(keys, values, listed=listed)))
        sample = [size_of(pair) for pair in block[:: max(1, len(block) // 8)]]
        held = sum(sample) * len(block) // len(sample)
        if held < block_bytes // 2:
            size *= 2
        elif held > block_bytes * 2:
            size = max(1, size * block_bytes // held)
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
        self._sums = new_sums() if self._adds else None  # until a bucket comes that is no text with integers
        self._added = 0
        self._next_look = 1
        self._block_bytes = max(4096, min(limit_bytes // (2 * _FAN_IN), _BLOCK_BYTES))
        self._runs: list[tuple[int, Run]] = []  # with how often they were merged

    def add_packed(self, data: bytes) -> None:
        """What one bucket holds, packed.

        Raises:
            TypeError: two keys cannot be compared.
        """
        if self._sums is not None:
            if self._sums.add(data):
                if self._sums.held_bytes() >= self._limit_bytes:
                    self._spill()
                return
            self._spill()
            self._sums = None
        self.add(*unpack(data))

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
            held = size_of_lists(self._values)
            if held >= self._limit_bytes:
                self._spill()
            else:
                self._next_look = plan_next_look(self._added, (self._limit_bytes - held) / (held / self._added))

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
        """Every key with its values, in the order of the keys. Once.

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
        streams = [read_blocks(self._spool, run) for _, run in self._runs]
        for key, entries in groupby(heapq.merge(*streams, key=_first), key=_first):
            yield key, chain.from_iterable(listed for _, listed in entries)

    def _spill(self) -> None:
        values, self._values = self._values, {}
        self._added, self._next_look = 0, 1
        if self._sums:
            sums, self._sums = self._sums, new_sums()
            self._runs.append((0, self._write((key, [value]) for key, value in sorted_items(sums))))
        if values:
            self._runs.append((0, self._write(_entries(values, self._block_bytes))))
        while len(self._runs) >= _FAN_IN and self._runs[-1][0] == self._runs[-_FAN_IN][0]:
            level = self._runs[-1][0]
            streams = [read_blocks(self._spool, run) for _, run in self._runs[-_FAN_IN:]]
            del self._runs[-_FAN_IN:]
            self._runs.append((level + 1, self._write(heapq.merge(*streams, key=_first))))

    def _write(self, entries: Iterable[tuple[Any, list[Any]]]) -> Run:
        return write_blocks(self._spool, entries, self._block_bytes, listed=True)


def _entries(values: dict[Any, Any], block_bytes: int) -> Iterator[tuple[Any, list[Any]]]:
    for key in _sorted(values):
        value = values.pop(key)
        listed = value if type(value) is list else [value]
        most = max(1, min(block_bytes // (2 * size_of(listed[0])), _VALUES)) if len(listed) > 1 else 1
        for start in range(0, len(listed), most):
            yield key, listed[start : start + most]


def _sorted(values: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError as error:
        raise TypeError(
            f"map_reduce: keys cannot be sorted: {error}.\n"
            "Let map yield keys that can be compared with each other; in tuples, item by item."
        ) from None
