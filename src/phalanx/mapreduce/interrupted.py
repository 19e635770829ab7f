"""Where a rank was lost, `phalanx.elastic.run` calls the function around `map_reduce` again: what was done is kept.

One job at most, the one that was interrupted. It is found again by its place among the calls and by all that it was
called with; another call, or the same with other values in a closure, is another job.
"""

from __future__ import annotations

import hashlib

import cloudpickle

from phalanx.mapreduce.attempt import Held
from phalanx.mapreduce.job import Job

_kept: tuple[bytes, Held] | None = None
_generation = -1
_calls = 0


def count_call(generation: int) -> int:
    """The number of this call among those since the ranks met last."""
    global _generation, _calls
    if generation != _generation:
        _generation, _calls = generation, 0
    _calls += 1
    return _calls


def keep(call: int, job: Job, held: Held) -> None:
    """The call is about to end, because a rank was lost."""
    global _kept
    if _kept is not None and _kept[1] is not held:
        _kept[1].close()
    digest = _digest(call, job)
    _kept = None if digest is None else (digest, held)


def take(call: int, job: Job) -> Held | None:
    """What such a call has left."""
    global _kept
    if _kept is None or _kept[0] != _digest(call, job):
        return None
    held, _kept = _kept[1], None
    held.num_kept = len(held.outputs)
    return held


def _digest(call: int, job: Job) -> bytes | None:
    try:
        inputs = job.inputs if job.sequence is None else len(job.sequence)
        data = cloudpickle.dumps((call, job.terms, inputs, job.map, job.reduce, job.combine))
    except Exception:  # a function holds what cannot be told apart: then nothing is kept
        return None
    return hashlib.sha256(data).digest()
