"""Run one map task: map the records of a split to pairs, and write them into a bucket for each partition."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from phalanx._base.malloc import release_freed_values
from phalanx.mapreduce.buckets import Values, pack_buckets
from phalanx.mapreduce.counters import Counters
from phalanx.mapreduce.keys import find_kinds
from phalanx.mapreduce.map_reduce_job import MapReduceJob
from phalanx.mapreduce.records import read_blocks
from phalanx.mapreduce.splits import Split
from phalanx.mapreduce.spool import Spool, SpoolExtent
from phalanx.mapreduce.table import Table

_SLICE_S = 0.05
_GC_THRESHOLD = 50_000


@dataclass
class MapOutput:
    """A `MapOutput` is a task's output in the spool. `runs[i][partition]` is the extent of a bucket."""

    runs: list[list[SpoolExtent]] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    counters: Counters = field(default_factory=Counters)
    seconds: float = 0.0


def run_map_task(split: Split, job: MapReduceJob, spool: Spool, is_open: Callable[[], bool]) -> MapOutput | None:
    """Run a task and return its output. Poll `is_open`; once it returns False, remove the output and return None.

    The same split always gives the same output, on every rank: the data decide when a table is spilled, not the time.
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
                table.map_records(block, start, stop)
                spent = time.perf_counter() - at
                # Map for about `_SLICE_S` at a time, so that `is_open` is polled about twenty times a second.
                size = max(1, size * 2 if spent < _SLICE_S / 2 else size // 2 if spent > _SLICE_S * 2 else size)
                start = stop
                if not is_open():
                    spool.truncate(begin)
                    return None
        _write_run(table, job, spool, output)
    except BaseException:
        spool.truncate(begin)
        raise
    output.seconds = time.monotonic() - began
    return output


def _write_run(table: Table, job: MapReduceJob, spool: Spool, output: MapOutput) -> None:
    types, contents = table.drain()
    if not len(contents):
        return
    output.kinds |= find_kinds(types)
    runs: list[list[SpoolExtent]] = [[]]
    for partition, number, data in pack_buckets(contents, types, job):
        if number == len(runs):
            runs.append([])
        runs[number] += [SpoolExtent(0, 0)] * (partition - len(runs[number]))
        runs[number].append(spool.append(data))
        output.counters.bucket_bytes += len(data)
    if isinstance(contents, Values):
        release_freed_values(contents.held_bytes, contents.count)
    output.runs += [run + [SpoolExtent(0, 0)] * (job.partitions - len(run)) for run in runs]


@contextlib.contextmanager
def rarely_collecting() -> Iterator[None]:
    """Collect garbage rarely inside the context: pairs are created by the million, and never form cycles."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(_GC_THRESHOLD, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
