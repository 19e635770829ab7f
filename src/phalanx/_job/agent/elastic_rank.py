"""An `ElasticRank` is what the agent knows of one process of an elastic job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx._job.agent.failure import Report


@dataclass
class ElasticRank:
    """An `ElasticRank` is a process in a slot. `holds_state`: others can continue from its state. `generation` is the
    latest that it has joined.
    """

    slot: int
    pid: int
    joined: bool = False
    holds_state: bool = False
    outlives: bool = False  # whether it outlives its zygote
    generation: int = 0
    step: int = -1
    min_ranks: int = 1
    wait_s: float = 0.0
    has_lost: int = -1  # the latest generation that it has reported as over
    progress: dict[str, Any] = field(default_factory=dict)
    report: Report | None = None  # its report, if it is about to end
