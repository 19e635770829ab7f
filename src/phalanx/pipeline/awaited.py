"""What a rank will receive in a step, in order: its schedule says it before anything has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phalanx.partition.parts import Part
from phalanx.pipeline.schedule import Action
from phalanx.pipeline.wire import Edge


class Awaited(NamedTuple):
    """A message, and the action of this rank that needs it."""

    at: int
    """The action's place in the rank's order."""
    edge: Edge
    micro_batch: int


def plan_receives(order: Sequence[Action], own: Mapping[int, Part]) -> list[Awaited]:
    """Return the messages from other ranks that actions in this order need, as they take them. `own`: this rank's
    stages.

    Of gradients those that may come: a micro-batch's values may turn out to need none.
    """
    found = []
    for at, (kind, stage, micro_batch) in enumerate(order):
        part = own[stage]
        if kind == "F":
            sources = dict.fromkeys([stage - 1, *part.receives]) if stage else ()
            edges = [Edge(source, stage) for source in sources if source not in own]
        elif kind == "W":
            edges = []
        else:
            edges = [Edge(target, stage, True) for target in part.sends if target not in own]
        found += [Awaited(at, edge, micro_batch) for edge in edges]
    return found
