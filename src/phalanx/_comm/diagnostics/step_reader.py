"""Read a rank's step file up to the last event, even if the rank was killed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx._comm.diagnostics.step_file import (
    OperationRecord,
    StepFileContents,
    StepRecord,
    read_contents,
    read_events,
)
from phalanx._comm.diagnostics.step_machine import OTHER, PHASES, FinishedStep, StepMachine
from phalanx._comm.diagnostics.step_tally import StepTally


@dataclass(frozen=True)
class RankFile:
    """A `RankFile` is the content of a rank's file."""

    facts: Mapping[str, Any]
    steps_done: int
    phase: str
    phase_since: float
    ended: bool
    num_workers: int | None
    peak_bytes: int
    begun: float
    unix_offset: float
    operations_seen: int
    cost_s: float
    steps: tuple[StepRecord, ...]
    operation_stride: int
    operations: tuple[OperationRecord, ...]
    reached: int | None = None
    """The number of the run's last step, which only other ranks may have reached; None if unknown."""
    first_broken: int | None = None
    """The first step whose loss was not finite."""
    last_finite: int = 0
    """The last step whose loss was finite."""


def read_rank_file(data: bytes) -> RankFile | None:
    """Parse the bytes of a file; return None if it is not a rank's file. The rank may have died at any point."""
    try:
        contents = read_contents(data)
        return None if contents is None else _catch_up(contents)
    except (ValueError, OverflowError, IndexError, KeyError, TypeError, AttributeError):  # the file was overwritten
        return None


def read_folder(folder: str | os.PathLike[str]) -> list[RankFile]:
    """Return the rank files in `folder`, in the order of their names."""
    found = []
    for path in sorted(Path(folder).glob("*.steps")):
        try:
            read = read_rank_file(path.read_bytes())
        except OSError:
            continue
        if read is not None:
            found.append(read)
    return found


def order_records(records: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
    """Return the records with increasing times, also where the clock was set back (a restored snapshot)."""
    ordered: list[StepRecord] = []
    for record in records:
        begin = max(record.begin, ordered[-1].end) if ordered else record.begin
        end = max(record.end, begin)
        parts = {name: max(0.0, getattr(record, name)) for name in (*PHASES, "waited", "longest")}
        ordered.append(record._replace(begin=begin, end=end, **parts))
    return tuple(ordered)


def _catch_up(contents: StepFileContents) -> RankFile:
    """Return the file with the steps that the rank had not yet turned into records."""
    state = contents.state
    tally = StepTally(**state.get("tally", {"rank": contents.facts.get("rank", 0)}))
    pending = state.get("pending")
    late = [] if pending is None else [StepRecord(*pending)]

    def on_step(step: FinishedStep) -> None:
        late.append(tally.add(step))

    machine = StepMachine.resume(state.get("machine", {"since": contents.begun}), on_step)
    flat = read_events(contents.events, int(state.get("taken", 0)), contents.num_events)
    for at in range(0, len(flat), 3):
        machine.feed(*flat[at : at + 3])
    # The rank may have died after writing records and before its state: then both have these steps.
    twice = sum(record.num_steps for record in contents.steps) - state.get("in_records", 0)
    while late and twice > 0:
        twice -= late.pop(0).num_steps
    return RankFile(
        facts=contents.facts,
        steps_done=tally.num_steps,
        phase=PHASES[machine.phase] if 0 <= machine.phase < len(PHASES) else PHASES[OTHER],
        phase_since=machine.since,
        ended=contents.ended,
        num_workers=machine.num_workers if machine.num_workers >= 0 else None,
        peak_bytes=contents.peak_bytes,
        begun=contents.begun,
        unix_offset=contents.unix_offset,
        operations_seen=contents.operations_seen,
        cost_s=contents.cost_s,
        steps=order_records(contents.steps + tuple(late)),
        operation_stride=contents.operation_stride,
        operations=contents.operations,
        reached=tally.reached,
        first_broken=tally.first_broken or None,
        last_finite=tally.last_finite,
    )
