"""Describe where in the schedule a step failed: the stage, the micro-batch and the layer."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from phalanx.errors import PeerLostError, PhalanxError
from phalanx.pipeline.explanation import ideal, plain
from phalanx.pipeline.progress import StepProgress
from phalanx.pipeline.schedule import Action, PipelineSchedule
from phalanx.pipeline.stage import Stage

_DOING = {"F": "forward", "B": "backward", "I": "backward (of its inputs)", "W": "backward (of its weights)"}
_COLUMNS, _ROWS = 150, 8  # a larger drawing hides the error
_MARK = "x"  # other cells never contain it


class StageFailedError(PhalanxError):
    """Another stage has failed and has notified this one."""


class StageLostError(PeerLostError):
    """Another stage has lost a peer and has notified this one."""


def describe_failure(step: StepProgress, stages: Mapping[int, Stage], rank: int) -> str:
    """Return the place of a failure: 'Pipeline: stage 1 (rank 1), micro-batch 3, forward in layer 'encoder.4''."""
    at = step.at
    if at is None:
        return f"Pipeline: rank {rank}"
    stage = stages[at.stage]
    layers = [layer.name for layer in stage.part.layers]
    place = f"layers {layers[0]!r} to {layers[-1]!r}" if len(layers) > 1 else f"layer {layers[0]!r}"
    doing = f"{_DOING[at.kind]} of {place}"
    if stage.program.running:
        again = "" if at.kind == "F" else ", which is run again,"
        doing = f"forward{again} in layer {stage.program.at!r}"
    if step.awaited is not None:
        doing += f", waiting for stage {step.awaited}"
    return f"Pipeline: stage {at.stage} (rank {rank}), micro-batch {at.micro_batch}, {doing}"


def draw_failure(schedule: PipelineSchedule | None, at: Action | None) -> list[str]:
    """Return a drawing of the schedule, or the part of a large one around the cell of `at`, with that cell marked."""
    if schedule is None or at is None:
        return []
    lines = plain(schedule, ideal(schedule), at, columns=None)
    rank = schedule.rank_of(at.stage)
    first = max(0, min(rank - _ROWS // 2, len(lines) - _ROWS))
    lines, mark = lines[first : first + _ROWS], lines[rank].index(_MARK)
    if max(map(len, lines)) <= _COLUMNS:
        return lines
    name = lines[0].index("|") + 1
    begin = max(name, mark - _COLUMNS // 2)
    names = [line[: line.index("|") + 1].ljust(name) for line in lines]
    return [
        f"{label}{'' if begin == name else '... '}{line[begin : begin + _COLUMNS]}"
        f"{' ...' if len(line) > begin + _COLUMNS else ''}"
        for label, line in zip(names, lines, strict=True)
    ]


def with_note(error: BaseException, note: str) -> BaseException:
    """Add `note` to the error's message (from Python 3.11, as a note if need be), and return the error."""
    if type(error).__str__ in (Exception.__str__, BaseException.__str__) and len(error.args) == 1:
        error.args = (f"{error.args[0]}\n{note}",)
    elif sys.version_info >= (3, 11):
        error.add_note(note)
    return error
