"""What a map task has yielded so far, by key: values folded by `combine`, or listed in the order in which they came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from phalanx.mapreduce.counters import Counters
from phalanx.mapreduce.job import Job
from phalanx.mapreduce.records import Block
from phalanx.mapreduce.sizes import size_of, size_of_table

_missing = object()


class NotPairsError(Exception):
    """What the map function yields is no pair with a key, or `combine` failed: a mistake, and no bad record."""


class Table:
    """Keys and values in memory, up to a limit that its owner asks for with `is_full`."""

    def __init__(self, job: Job, counters: Counters, limit_bytes: int) -> None:
        self._job = job
        self._counters = counters
        self._limit_bytes = limit_bytes
        self.values: dict[Any, Any] = {}
        self._pairs = 0  # since it was empty
        self._mapped = 0  # records
        self._next_look = 256
        self._value_bytes = 0.0  # of a listed value, on average

    def take(self, block: Block, start: int, stop: int) -> None:
        """Map the records `start` to `stop` of a block. Each has its whole effect, or, if it is bad, none.

        Raises:
            NotPairsError: what was yielded is no pair, or cannot be folded.
            MemoryError: as it says; no fault of the record.
        """
        items = iter(block.items[start:stop])
        records = items if block.fetch is None else map(block.fetch, items)
        mapped = map(list, map(self._job.map, records))  # after an exception it goes on with the next
        fold = self._list if self._job.combine is None else self._add if self._job.adds else self._combine
        self._mapped = start
        while True:
            problem: Exception
            try:
                fold(mapped)
                if self._mapped == stop:
                    break
                problem = RuntimeError("map raised StopIteration")  # which ends a loop without a word
            except (NotPairsError, MemoryError):
                raise
            except Exception as error:
                problem = error
            self._counters.count_bad(block.locate(self._mapped), block.items[self._mapped], problem)
            self._mapped += 1
        self._counters.records += stop - start

    def _add(self, mapped: Iterable[list[Any]]) -> None:
        values, missing = self.values, _missing
        get = values.get
        for pairs in mapped:
            self._mapped += 1
            self._pairs += len(pairs)
            try:
                for key, value in pairs:
                    old = get(key, missing)
                    values[key] = value if old is missing else old + value
            except Exception as error:
                raise NotPairsError(_describe(pairs, error)) from error

    def _combine(self, mapped: Iterable[list[Any]]) -> None:
        values, missing, combine = self.values, _missing, self._job.combine
        assert combine is not None
        get = values.get
        for pairs in mapped:
            self._mapped += 1
            self._pairs += len(pairs)
            try:
                for key, value in pairs:
                    old = get(key, missing)
                    values[key] = value if old is missing else combine(old, value)
            except Exception as error:
                raise NotPairsError(_describe(pairs, error)) from error

    def _list(self, mapped: Iterable[list[Any]]) -> None:
        values = self.values
        get = values.get
        pairs: list[Any] = []
        for pairs in mapped:
            self._mapped += 1
            self._pairs += len(pairs)
            try:
                for key, value in pairs:
                    old = get(key)
                    if old is None:
                        values[key] = [value]
                    else:
                        old.append(value)
            except Exception as error:
                raise NotPairsError(_describe(pairs, error)) from error

    def is_full(self) -> bool:
        """Whether it holds about as much as it may. Ask where blocks end: then the answer is always the same."""
        if self._pairs < self._next_look:
            return False
        held = self._size()
        room = self._limit_bytes - held
        if room <= 0:
            return True
        # Half of what would fill it, at the size of those that are there; and no later than when it has doubled.
        self._next_look = self._pairs + max(64, min(self._pairs, int(room / (held / self._pairs) / 2)))
        return False

    def _size(self) -> int:
        if self._job.combine is not None:
            return size_of_table(self.values)
        # Lists are counted by the values in them: a few keys may have most.
        step = max(1, len(self.values) // 64)
        sample = [size_of(value[-1]) + 9 for value in list(self.values.values())[::step]]
        return size_of_table(self.values, 0) + self._pairs * sum(sample) // max(1, len(sample))

    def drain(self) -> dict[Any, Any]:
        """What is there; empty afterwards."""
        values, self.values = self.values, {}
        self._counters.pairs += self._pairs
        self._counters.combined_pairs += len(values)
        self._pairs, self._next_look = 0, 256
        return values


def _describe(pairs: list[Any], error: Exception) -> str:
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            return f"map must yield (key, value) pairs, and yielded {pair!r:.100}"
        try:
            hash(pair[0])
        except TypeError:
            return f"map yielded the key {pair[0]!r:.100}, a {type(pair[0]).__name__}, which cannot be hashed"
    return f"combine raised {type(error).__name__}: {error}"


def values_in_order(table: dict[Any, Any], keys: Iterable[Any], *, listed: bool) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Each key with its values."""
    for key in keys:
        yield key, iter(table[key]) if listed else chain((table[key],))
