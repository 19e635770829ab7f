"""Keep what a `map_reduce` has done when a rank is lost, for the call that `phalanx.elastic.run` makes again.

It keeps one job at most, the one that was interrupted. The call that takes it must stand at the same place (as many
commits, and as many calls since the latest one), and have the same arguments: its functions, the records of its
sequence by value, and its files, none of which was written to since the interrupted call began.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from phalanx.mapreduce.attempt import Held
from phalanx.mapreduce.map_reduce_job import MapReduceJob
from phalanx.mapreduce.splits import find_files


@dataclass(frozen=True)
class Call:
    """It is one call of `map_reduce`.

    `place` has the number of commits of the elastic state before it, and its own number among the calls since the
    latest of them; `files` are those that it reads, as they were when it began.
    """

    place: tuple[int, int]
    files: tuple[tuple[str, int, int, int], ...] = ()


_kept: tuple[Call, bytes, Held] | None = None
_since = (-1, -1)  # generation and commits
_calls = 0


def begin_call(generation: int, commits: int, job: MapReduceJob) -> Call:
    """Describe the call that begins. Calls are counted from the latest commit, or meeting of the ranks, on."""
    global _since, _calls
    if (generation, commits) != _since:
        _since, _calls = (generation, commits), 0
    _calls += 1
    return Call((commits, _calls), _look_at_files(job))


def _look_at_files(job: MapReduceJob) -> tuple[tuple[str, int, int, int], ...]:
    if job.sequence is not None:
        return ()
    try:
        paths = [path for path, _ in find_files(job.inputs)]
        return tuple((path, *_stamp(os.stat(path))) for path in paths)
    except (OSError, ValueError):  # the call itself says so, on every rank
        return ()


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino


def keep(call: Call, job: MapReduceJob, held: Held) -> None:
    """Keep what was done, when the call is about to end because a rank was lost. This reads the job's sequence once."""
    global _kept
    drop()
    digest = _digest(job)
    _kept = None if digest is None else (call, digest, held)


def take(call: Call, job: MapReduceJob) -> Held | None:
    """Return what such a call has left, or None; this reads the sequence if something is kept."""
    global _kept
    if _kept is None or call.place < _kept[0].place:
        return None
    if call != _kept[0] or _digest(job) != _kept[1]:
        drop()  # the program has gone another way, or its inputs are others: nobody will come for it
        return None
    held, _kept = _kept[2], None
    held.num_kept = len(held.outputs)
    return held


def drop() -> None:
    """Let go of what is kept."""
    global _kept
    if _kept is not None:
        _kept[2].close()
        _kept = None


def _digest(job: MapReduceJob) -> bytes | None:
    content = _Digest()
    inputs: Sequence[Any] = () if job.sequence is None else (job.sequence,)
    try:
        pickler = cloudpickle.CloudPickler(content, protocol=5)
        pickler.dump((job.terms, inputs, job.map, job.reduce, job.combine))
    except Exception:  # an argument holds what cannot be told apart: then nothing is kept
        return None
    return content.value()


class _Digest:
    """It is a file that keeps only the hash of what is written to it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return len(data)

    def value(self) -> bytes:
        return self._hash.digest()
