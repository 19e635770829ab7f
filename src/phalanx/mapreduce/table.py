"""A `Table` holds the values that a map task has yielded so far, by key: combined, or listed in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from phalanx.errors import summary_of
from phalanx.mapreduce.buckets import Values
from phalanx.mapreduce.counters import Counters
from phalanx.mapreduce.map_reduce_job import MapReduceJob
from phalanx.mapreduce.records import RecordBlock
from phalanx.mapreduce.sizes import plan_next_check, size_of_lists, size_of_table
from phalanx.mapreduce.sums import TextSums, new_sums


class NotPairsError(Exception):
    """The map function yields something other than pairs, or `combine` failed: the program is wrong, not a record."""


class Table:
    """A `Table` holds keys and values in memory up to a limit; then it calls `spill`, which empties it with `drain`.

    Only the data determine when: the dict's size is measured between two records, after some number of pairs. While all
    pairs are text with integers to add, `TextSums` replaces the dict.
    """

    def __init__(self, job: MapReduceJob, counters: Counters, limit_bytes: int, spill: Callable[[Table], None]) -> None:
        self._job = job
        self._counters = counters
        self._limit_bytes = limit_bytes
        self._spill = spill
        self._values: dict[Any, Any] = {}
        self._sums = new_sums() if job.adds else None
        self._pairs = 0  # since the table was empty
        self._next_check = 1

    def map_records(self, block: RecordBlock, start: int, stop: int) -> None:
        """Map the records `start` to `stop` of a block. A record takes effect completely or, if it is bad, not at all.

        Raises:
            NotPairsError: the map function yielded something that is not a pair, or `combine` failed.
            MemoryError: memory is exhausted; the record does not count as bad.
        """
        items = iter(block.items[start:stop])
        records = items if block.fetch is None else map(block.fetch, items)
        mapped = map(self._job.map, records)  # after an exception the iterator continues with the next record
        self._counters.records += stop - start
        progress: list[Any] = [0, 0, None]
        mapped_before: list[Any] | None = None  # the pairs of a record that are still to be folded
        while start < stop:
            problem: Exception | None = None
            is_new = mapped_before is None
            try:
                self._fold(mapped if is_new else iter([mapped_before]), progress)
            except MemoryError:
                raise
            except Exception as error:
                if progress[2] is not None:
                    raise NotPairsError(_describe(progress[2], error)) from error
                problem = error
            start += progress[0]
            self._pairs += progress[1]
            mapped_before = progress[2]
            if mapped_before is not None:
                self._leave_sums()
            elif self._is_due():
                self._measure()
            elif start < stop and is_new:
                # A StopIteration from the map function would end the loop silently: it makes the record bad, too.
                problem = problem or RuntimeError("map raised StopIteration")
                self._counters.count_bad(block.locate(start), block.items[start], problem)
                start += 1

    def _fold(self, mapped: Iterator[Any], progress: list[Any]) -> None:
        if self._sums is not None:
            self._sums.fold(mapped, self._limit_bytes, progress)
        else:
            fold_pairs(
                self._values, mapped, self._job.combine, self._job.adds, self._next_check - self._pairs, progress
            )

    def _leave_sums(self) -> None:
        """Switch to a dict because a pair is not text with an integer."""
        if self._sums:
            self._spill(self)
        self._sums = None

    def _is_due(self) -> bool:
        if self._sums is not None:
            return self._sums.held_bytes() >= self._limit_bytes
        return self._pairs >= self._next_check

    def _measure(self) -> None:
        if self._sums is not None:
            self._spill(self)
            return
        used = self._size()
        room = self._limit_bytes - used
        if room <= 0:
            self._spill(self)
        else:
            count = self._pairs if self._job.combine is None else len(self._values)
            self._next_check = self._pairs + plan_next_check(count, room / (used / count)) - count

    def _size(self) -> int:
        return size_of_lists(self._values) if self._job.combine is None else size_of_table(self._values)

    def drain(self) -> tuple[set[type], Values | TextSums]:
        """Return the types of the keys, and the contents; the table is empty afterwards."""
        contents: Values | TextSums
        if self._sums is not None:
            contents, self._sums = self._sums, new_sums()
            types = {contents.key_type()}
        else:
            count = self._pairs if self._job.combine is None else len(self._values)
            contents, self._values = Values(self._values, count, self._size()), {}
            types = set(map(type, contents.by_key))
        self._counters.pairs += self._pairs
        self._counters.combined_pairs += len(contents)
        self._pairs, self._next_check = 0, 1
        return types, contents


def _describe(pairs: list[Any], error: Exception) -> str:
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            return f"map must yield (key, value) pairs, but yielded {pair!r:.100}"
        try:
            hash(pair[0])
        except TypeError:
            return f"map yielded the key {pair[0]!r:.100}, a {type(pair[0]).__name__}, which cannot be hashed"
    return f"combine raised {summary_of(error)}"


__all__ = ["fold_in_python", "fold_pairs"]

_missing = object()


def fold_in_python(
    values: dict[Any, Any],
    mapped: Iterator[Iterable[Any]],
    combine: Callable[[Any, Any], Any] | None,
    adds: bool,
    limit: int,
    progress: list[Any],
) -> None:
    """Do exactly what `fold_pairs` of csrc/py_fold.c does."""
    records = count = 0
    progress[2] = None
    try:
        for one in mapped:
            pairs = list(one)
            try:
                if combine is None:
                    _list(values, pairs)
                elif adds:
                    _add(values, pairs)
                else:
                    _combine(values, pairs, combine)
            except BaseException:
                progress[2] = pairs
                raise
            records += 1
            count += len(pairs)
            if count >= limit:
                break
    finally:
        progress[:2] = records, count


def _list(values: dict[Any, Any], pairs: list[Any]) -> None:
    get = values.get
    for key, value in pairs:
        old = get(key)
        if old is None:
            values[key] = [value]
        else:
            old.append(value)


def _add(values: dict[Any, Any], pairs: list[Any]) -> None:
    get, missing = values.get, _missing
    for key, value in pairs:
        old = get(key, missing)
        values[key] = value if old is missing else old + value


def _combine(values: dict[Any, Any], pairs: list[Any], combine: Callable[[Any, Any], Any]) -> None:
    get, missing = values.get, _missing
    for key, value in pairs:
        old = get(key, missing)
        values[key] = value if old is missing else combine(old, value)


try:
    from phalanx._core import fold_pairs
except ImportError:  # no compiler was found, or this is not Linux
    fold_pairs = fold_in_python
