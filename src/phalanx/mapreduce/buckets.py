"""Turn a full table into buckets, which are packed columns of keys and values: one or more for each partition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.mapreduce.columns import pack
from phalanx.mapreduce.keys import partitions_of
from phalanx.mapreduce.map_reduce_job import MapReduceJob
from phalanx.mapreduce.sums import TextSums

_BUCKETS = 32  # a bucket has at most 1/32 of the memory
_PAIR_BYTES = 150  # the bytes of a str and an int in a dict, without the characters


@dataclass
class Values:
    """`Values` has values by key, combined or in lists, with their number and size in bytes."""

    by_key: dict[Any, Any]
    count: int
    held_bytes: int

    def __len__(self) -> int:
        return len(self.by_key)


def pack_buckets(contents: Values | TextSums, types: set[type], job: MapReduceJob) -> Iterator[tuple[int, int, bytes]]:
    """Yield (partition, number within the partition, bucket), ordered by partition. `contents` may be emptied.

    `types` are the types of the keys. A partition that is too large for one bucket gets several.
    """
    most = job.memory_bytes // _BUCKETS
    if isinstance(contents, Values):
        return _pack_values(contents, types, job, most)
    return _pack_sums(contents, job.partitions, most)


def _pack_sums(sums: TextSums, partitions: int, most_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    most = max(1, most_bytes // (_PAIR_BYTES + sums.text_bytes() // len(sums)))
    start = 0
    for partition, end in enumerate(sums.partition(partitions)):
        for number, at in enumerate(range(start, end, most)):
            stop = min(at + most, end)
            yield partition, number, sums.pack(at, stop) if sums.is_packable() else pack(*sums.items(at, stop))
        start = end


def _pack_values(
    contents: Values, types: set[type], job: MapReduceJob, most_bytes: int
) -> Iterator[tuple[int, int, bytes]]:
    values, listed = contents.by_key, job.combine is None
    partitions = partitions_of(values, types, job.partitions)
    order = np.argsort(partitions, kind="stable")
    keys = np.fromiter(values, object, len(values))[order]
    theirs = np.fromiter(values.values(), object, len(values))[order]
    values.clear()
    counts = np.fromiter(map(len, theirs), np.int64, len(theirs)) if listed else np.ones(len(theirs))
    most = max(1, int(most_bytes * counts.sum() / contents.held_bytes))  # the maximum number of pairs in a bucket
    start = 0
    for partition, end in enumerate(np.cumsum(np.bincount(partitions, minlength=job.partitions)).tolist()):
        parts: Iterable[tuple[list[Any], list[Any]]] = ((keys[start:end].tolist(), theirs[start:end].tolist()),)
        if counts[start:end].sum() > most:
            parts = _cut(*next(iter(parts)), most, listed=listed)
        for number, (some, own) in enumerate(parts if end > start else ()):
            yield partition, number, pack(some, own, listed=listed)
        start = end


def _cut(keys: list[Any], values: list[Any], most: int, *, listed: bool) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield parts of at most `most` pairs each; a key with more values appears in several parts."""
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
