"""An `ElasticRank` is the agent's record of one process of an elastic job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx._job.agent.failure import ExceptionReport


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
    lost_generation: int = -1  # the latest generation that it has reported as over
    progress: dict[str, Any] = field(default_factory=dict)
    report: ExceptionReport | None = None  # its report, if it is about to end
    told: tuple[bool, str] | None = None  # of its loss: whether the ranks disagreed, and its error
    due: tuple[float, str] | None = None  # when to kill it, and why
    evicted: str = ""  # why it was killed, and has not ended yet
    abandon_at: float | None = None  # when the job continues although the killed process has not ended
    continued: bool = False  # it was sent SIGCONT instead of being killed
