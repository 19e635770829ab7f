"""Telling a failure by its cell in the schedule: which stage, which micro-batch, which layer."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from phalanx.pipeline.schedule import Action
from phalanx.pipeline.stage import Stage

_DOING = {"F": "forward", "B": "backward", "I": "backward (of its inputs)", "W": "backward (of its weights)"}


def describe_failure(at: Action | None, rank: int, stages: Mapping[int, Stage], error: BaseException) -> str:
    """Where it was: 'Pipeline: stage 1 (rank 1), micro-batch 3, forward, in layer 'encoder.4''."""
    if at is None:
        return f"Pipeline: rank {rank}"
    stage = stages[at.stage]
    layers = [layer.name for layer in stage.part.layers]
    span = f"layers {layers[0]!r} to {layers[-1]!r}" if len(layers) > 1 else f"layer {layers[0]!r}"
    place = f"in layer {stage.program.at!r}" if at.kind == "F" and stage.program.running else f"of {span}"
    return f"Pipeline: stage {at.stage} (rank {rank}), micro-batch {at.micro_batch}, {_DOING[at.kind]} {place}"


def with_note(error: BaseException, note: str) -> BaseException:
    """The same error, which says where it was."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
    return error
