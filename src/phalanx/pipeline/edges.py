"""Define the edges between stages, the data of a step that all stages share, and the errors of a failed stage."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.errors import PeerLostError, PhalanxError


class Edge(NamedTuple):
    """An `Edge` carries messages from one stage to another; `backward` if they are gradients.

    Each is ordered by itself.
    """

    source: int
    target: int
    backward: bool = False


class StepPlan(NamedTuple):
    """A `StepPlan` is the data that all stages share of a step: its micro-batches, the rows of this one and of all.

    `seed` is this micro-batch's. `has_state` says that some stage has drawn random numbers; then the first value is the
    generators' state after that. `micro_batch` is its number, which only the sender knows.
    """

    micro_batches: int
    rows: int
    all_rows: int
    seed: int = 0
    has_state: bool = False
    micro_batch: int = 0


class StageFailedError(PhalanxError):
    """Another stage has failed and has notified this one."""


class StageLostError(PeerLostError):
    """Another stage has lost a peer and has notified this one."""
