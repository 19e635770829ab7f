"""Define the edges between stages, what all stages know of a step, and the errors of a stage that failed."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.errors import PeerLostError, PhalanxError


class Edge(NamedTuple):
    """An edge carries messages from one stage to another; `backward` if they are gradients. Each has its own order."""

    source: int
    target: int
    backward: bool = False


class StepPlan(NamedTuple):
    """A `StepPlan` is what all stages must know of a step: its micro-batches, the rows of this one and of all.

    `seed` is that of this micro-batch. `has_state` says that some stage has drawn numbers; then the first of the values
    is the state of the generators after that. `micro_batch` is its number, which the sender alone knows.
    """

    micro_batches: int
    rows: int
    all_rows: int
    seed: int = 0
    has_state: bool = False
    micro_batch: int = 0


class StageFailedError(PhalanxError):
    """This error says that another stage has failed and told this one."""


class StageLostError(PeerLostError):
    """This error says that another stage has lost a peer and told this one."""
