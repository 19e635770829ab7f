"""Plan which messages a rank receives in a step, and in which order; its schedule says so before any has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phalanx._base.partition.parts import Part
from phalanx.pipeline.edges import Edge
from phalanx.pipeline.progress import StepProgress
from phalanx.pipeline.schedule import Action
from phalanx.pipeline.stage import Stage
from phalanx.pipeline.wire import AHEAD, Wire


class Awaited(NamedTuple):
    """An `Awaited` is a message, and the action of this rank that needs it."""

    at: int
    """The action's place in the rank's order."""
    edge: Edge
    micro_batch: int


def plan_receives(order: Sequence[Action], own: Mapping[int, Part]) -> list[Awaited]:
    """Return the messages from other ranks that actions in this order need, in order. `own` has this rank's stages.

    All gradients that may come are among them: a micro-batch's values may turn out to need none.
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


class ReceivesAhead:
    """`ReceivesAhead` has the receives of a step that are still to be posted."""

    def __init__(
        self, receives: Sequence[Awaited], wire: Wire, stages: Mapping[int, Stage], step: StepProgress
    ) -> None:
        """Take the receives of a step; `stages` are those of this rank."""
        self._receives = deque(receives)
        self._wire = wire
        self._stages = stages
        self._step = step
        self._posted_for: list[int] = []
        """The places, in the order of actions, of those actions to come for which receives are posted."""

    def post(self, at: int) -> None:
        """Start to receive what the action at this place of the order needs, and a little of what is needed next.

        It starts only receives of what is sure to come, and none of gradients of values that are still to be made.
        """
        if not self._receives:
            return
        self._posted_for = [other for other in self._posted_for if other > at]
        while self._receives:
            awaited = self._receives[0]
            if awaited.at > at and len(self._posted_for) >= AHEAD:
                return
            if awaited.edge.backward:
                held = self._stages[awaited.edge.target].in_flight.get(awaited.micro_batch)
                if held is None:
                    return
                if not held.outputs.get(awaited.edge.source):
                    self._receives.popleft()
                    continue
            self._receives.popleft()
            with self._step.talk_to(awaited.edge.source):
                self._wire.post(awaited.edge)
            if awaited.at > at:
                self._posted_for.append(awaited.at)
