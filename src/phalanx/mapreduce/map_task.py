"""One map task: the records of a split through the map function, into a bucket for each partition."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.mapreduce.columns import pack
from phalanx.mapreduce.counters import Counters
from phalanx.mapreduce.job import Job
from phalanx.mapreduce.keys import find_kinds, partitions_of
from phalanx.mapreduce.records import read_blocks
from phalanx.mapreduce.splits import Split
from phalanx.mapreduce.spool import Extent, Spool
from phalanx.mapreduce.table import Table

_SLICE_S = 0.05
_GC_THRESHOLD = 50_000
_BUCKETS = 32  # a bucket holds at most such a part of the memory


@dataclass
class MapOutput:
    """What a task has left in the spool: runs, each with the extent of the bucket of every partition, in order."""

    runs: list[list[Extent]] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    counters: Counters = field(default_factory=Counters)
    seconds: float = 0.0


def run_map_task(split: Split, job: Job, spool: Spool, is_wanted: Callable[[], bool]) -> MapOutput | None:
    """Do a task; None if `is_wanted`, which is asked now and then, said no. Then nothing of it is left in the spool.

    The same split gives the same output, on every rank, always: a table is emptied where the data say so, not time.
    """
    output = MapOutput()
    began, begin = time.monotonic(), spool.size
    table = Table(job, output.counters, job.memory_bytes // 4, lambda full: _write_run(full, job, spool, output))
    size = 1
    try:
        for block in read_blocks(split, job.sequence, job.encoding, job.block_bytes):
            output.counters.bytes_read += block.num_bytes
            for where, record, error in block.bad:
                output.counters.records += 1
                output.counters.count_bad(where, record, error)
            start = 0
            while start < len(block.items):
                at = time.perf_counter()
                stop = min(start + size, len(block.items))
                table.take(block, start, stop)
                spent = time.perf_counter() - at
                # So many records that others are asked some twenty times a second, not more.
                size = max(1, size * 2 if spent < _SLICE_S / 2 else size // 2 if spent > _SLICE_S * 2 else size)
                start = stop
                if not is_wanted():
                    spool.truncate(begin)
                    return None
        _write_run(table, job, spool, output)
    except BaseException:
        spool.truncate(begin)
        raise
    output.seconds = time.monotonic() - began
    return output


def _write_run(table: Table, job: Job, spool: Spool, output: MapOutput) -> None:
    values, held = table.drain()
    if not values:
        return
    types = set(map(type, values))
    output.kinds |= find_kinds(types)
    partitions = partitions_of(values, types, job.partitions)
    order = np.argsort(partitions, kind="stable")
    keys = np.fromiter(values, object, len(values))[order]
    listed = np.fromiter(values.values(), object, len(values))[order]
    values.clear()
    counts = np.fromiter(map(len, listed), np.int64, len(listed)) if job.combine is None else np.ones(len(listed))
    most = max(1, int(job.memory_bytes // _BUCKETS * counts.sum() / held))  # pairs of a bucket
    runs: list[list[Extent]] = [[]]
    start = 0
    for partition, end in enumerate(np.cumsum(np.bincount(partitions, minlength=job.partitions)).tolist()):
        parts: Iterable[tuple[list[Any], list[Any]]] = ((keys[start:end].tolist(), listed[start:end].tolist()),)
        if counts[start:end].sum() > most:
            parts = _cut(*next(iter(parts)), most, listed=job.combine is None)
        for number, (some, theirs) in enumerate(parts if end > start else ()):
            if number == len(runs):
                runs.append([])
            runs[number] += [Extent(0, 0)] * (partition - len(runs[number]))
            data = pack(some, theirs, listed=job.combine is None)
            runs[number].append(spool.append(data))
            output.counters.bucket_bytes += len(data)
        start = end
    output.runs += [run + [Extent(0, 0)] * (job.partitions - len(run)) for run in runs]


def _cut(keys: list[Any], values: list[Any], most: int, *, listed: bool) -> Iterator[tuple[list[Any], list[Any]]]:
    """Parts of at most so many pairs each; of a key with many values, too."""
    if not listed:
        for start in range(0, len(keys), most):
            yield keys[start : start + most], values[start : start + most]
        return
    some: list[Any] = []
    theirs: list[Any] = []
    room = most
    for key, own in zip(keys, values, strict=True):
        start = 0
        while start < len(own):
            some.append(key)
            theirs.append(own[start : start + room])
            start += len(theirs[-1])
            room -= len(theirs[-1])
            if not room:
                yield some, theirs
                some, theirs, room = [], [], most
    if some:
        yield some, theirs


@contextlib.contextmanager
def rarely_collecting() -> Iterator[None]:
    """Inside, pairs come and go by the million, none of them garbage: the collector looks at them for nothing."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(_GC_THRESHOLD, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
