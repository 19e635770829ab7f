"""Records of a rank's steps and collectives, as the rank's file holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx._comm.diagnostics.step_machine import PHASES


class StepRecord(NamedTuple):
    """A `StepRecord` is the sum of several steps; `first` is the number of the first one.

    The number is the run's if known. Times are seconds of CLOCK_MONOTONIC; parts are sums over the steps.
    """

    first: float
    num_steps: float
    begin: float
    end: float
    other: float
    data: float
    forward: float
    backward: float
    update: float
    samples: float
    loss: float  # sum over the steps that have a loss
    num_losses: float
    longest: float  # the longest step
    resident_bytes: float
    shared_bytes: float  # the shared part of these bytes
    cpu_s: float  # of the process, so far
    preemptions: float  # so far
    device_bytes: float
    rank: float  # it may change when others are lost
    generation: float
    waited: float = 0.0  # seconds of waiting for other ranks outside of collectives, not in any phase


class OperationRecord(NamedTuple):
    """An `OperationRecord` is a collective as this rank saw it: times are nanoseconds of CLOCK_MONOTONIC."""

    group: float
    kind: float
    seq: float
    num_bytes: float
    enter_ns: float
    leave_ns: float
    phase: float
    step: float
    status: float


def merge(a: StepRecord, b: StepRecord) -> StepRecord:
    """Merge two consecutive records into one."""
    names = ("num_steps", "other", "data", "forward", "backward", "update", "waited", "samples", "loss", "num_losses")
    sums = {name: getattr(a, name) + getattr(b, name) for name in names}
    return b._replace(
        first=a.first,
        begin=a.begin,
        longest=max(a.longest, b.longest),
        resident_bytes=max(a.resident_bytes, b.resident_bytes),
        shared_bytes=max(a.shared_bytes, b.shared_bytes),
        device_bytes=max(a.device_bytes, b.device_bytes),
        **sums,
    )


def order_records(records: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
    """Return the records with increasing times, also where the clock was set back (a restored snapshot)."""
    ordered: list[StepRecord] = []
    for record in records:
        begin = max(record.begin, ordered[-1].end) if ordered else record.begin
        end = max(record.end, begin)
        parts = {name: max(0.0, getattr(record, name)) for name in (*PHASES, "waited", "longest")}
        ordered.append(record._replace(begin=begin, end=end, **parts))
    return tuple(ordered)
