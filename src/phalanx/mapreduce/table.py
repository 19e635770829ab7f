"""What a map task has yielded so far, by key: values folded by `combine`, or listed in the order in which they came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from phalanx.mapreduce.counters import Counters
from phalanx.mapreduce.fold import fold_pairs
from phalanx.mapreduce.job import Job
from phalanx.mapreduce.records import Block
from phalanx.mapreduce.sizes import size_of, size_of_table


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
        mapped = map(self._job.map, records)  # after an exception it goes on with the next
        self._counters.records += stop - start
        progress: list[Any] = [0, 0, None]
        while True:
            problem: Exception
            try:
                fold_pairs(self.values, mapped, self._job.combine, self._job.adds, progress)
                problem = RuntimeError("map raised StopIteration")  # which ends a loop without a word
            except MemoryError:
                raise
            except Exception as error:
                if progress[2] is not None:
                    raise NotPairsError(_describe(progress[2], error)) from error
                problem = error
            start += progress[0]
            self._pairs += progress[1]
            if start == stop:
                break
            self._counters.count_bad(block.locate(start), block.items[start], problem)
            start += 1

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
