"""A `Result` is what `map_reduce` returns: sorted keys and values, of this rank or of all, with counters."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from phalanx.errors import ClosedError
from phalanx.mapreduce.columns import unpack
from phalanx.mapreduce.counters import BadRecord, Counters
from phalanx.mapreduce.exchange import exchange
from phalanx.mapreduce.grouper import Run
from phalanx.mapreduce.spool import Spool, SpoolStream
from phalanx.mapreduce.team import Team

_first = itemgetter(0)


class Result:
    """A `Result` iterates over (key, value), sorted by key, of this rank's partitions, or of all with `gather=True`.

    It can be iterated over repeatedly, and reads from memory or from disk. `close()`, the end of a `with`, or dropping
    the last reference releases the data.

    `counters` are the totals of all ranks, `partitions` the numbers of the partitions here, and `files` the files that
    this rank wrote. The job had `num_tasks` map tasks; on this rank, tasks failed `num_retries` times, and the rank ran
    `num_backups` tasks in place of stragglers.

    `group` is the group whose ranks have the other partitions; None for a single process.
    """

    def __init__(
        self,
        blocks: Mapping[int, tuple[SpoolStream, Sequence[int]]],
        spools: Sequence[Spool],
        counters: Counters,
        *,
        num_tasks: int,
        num_retries: int,
        num_backups: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._blocks = dict(blocks)
        self._spools = tuple(spools)
        self.counters = counters
        self.partitions = tuple(sorted(blocks))
        self.files: tuple[Path, ...] = ()
        self.num_tasks = num_tasks
        self.num_retries = num_retries
        self.num_backups = num_backups
        self.group = group
        self._is_closed = False

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError(
                "map_reduce: this result is closed, and its data is released: read it before you close it."
            )

    @property
    def bad_records(self) -> list[BadRecord]:
        """Return the first few bad records of all ranks."""
        return self.counters.bad_records

    def partition(self, number: int) -> Iterator[tuple[Any, Any]]:
        """Return the keys and values of one partition, in order.

        Raises:
            KeyError: the partition is not on this rank.
            ClosedError: the result was closed.
        """
        self._require_open()
        stream, lengths = self._blocks[number]
        return self._read(stream, lengths)

    def _read(self, stream: SpoolStream, lengths: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        at = 0
        for length in lengths:
            self._require_open()
            yield from zip(*unpack(stream.read(at, length)), strict=True)
            at += length

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self._require_open()
        return heapq.merge(*(self.partition(number) for number in self.partitions), key=_first)

    def close(self) -> None:
        """Release the data."""
        self._is_closed = True
        self._blocks, self.partitions = {}, ()
        for spool in self._spools:
            spool.close()

    def __enter__(self) -> Result:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        c = self.counters
        return (
            f"<Result of map_reduce: {c.records:,} records ({c.num_bad_records:,} bad), {c.pairs:,} pairs, "
            f"{len(self.partitions)} partitions here>"
        )


def blocks_of(results: Mapping[int, Run], spool: Spool) -> dict[int, tuple[SpoolStream, list[int]]]:
    """Return the partitions that this rank has reduced, in the form that a `Result` reads."""
    return {number: (SpoolStream(spool, run), [extent.length for extent in run]) for number, run in results.items()}


def gather_blocks(
    team: Team, results: Mapping[int, Run], spool: Spool, inbox: Spool, memory_bytes: int
) -> dict[int, tuple[SpoolStream, list[int]]]:
    """Return the partitions of all ranks; those of other ranks are received into `inbox`. All ranks call it."""
    mine = {number: [extent.length for extent in run] for number, run in sorted(results.items())}
    gathered: list[dict[int, list[int]]] = team.gather(mine)
    stream = SpoolStream(spool, [extent for number in mine for extent in results[number]])
    totals = [sum(map(sum, lengths.values())) for lengths in gathered]
    arrived = exchange(team, [stream] * team.size, totals, max(totals) if team.size > 1 else 0, inbox, memory_bytes)
    found: dict[int, tuple[SpoolStream, list[int]]] = {}
    for rank, lengths in enumerate(gathered):
        at = 0
        for number, run in lengths.items():
            total = sum(run)
            found[number] = (arrived[rank].part(at, total), run)
            at += total
    return found
