"""An `ElasticRank` is the agent's record of one process of an elastic job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx._job.agent.failure import ExceptionReport


@dataclass
class ElasticRank:
    """An `ElasticRank` is a process in a slot. `holds_state`: it has the training state, from which others can
    continue. `generation` is the latest that it has joined.
    """

    slot: int
    pid: int
    joined: bool = False
    holds_state: bool = False
    outlives: bool = False  # whether it survives its zygote
    generation: int = 0
    step: int = -1
    min_ranks: int = 1
    wait_s: float = 0.0
    lost_generation: int = -1  # the latest generation that it has left after an error
    progress: dict[str, Any] = field(default_factory=dict)
    report: ExceptionReport | None = None  # its exception, if it is about to exit
    loss_report: tuple[bool, str] | None = None  # why it left its group: whether the ranks disagreed, and its error
    due: tuple[float, str] | None = None  # when to kill it, and why
    evicted: str = ""  # why it was killed; it has not exited yet
    abandon_at: float | None = None  # when the job continues although the killed process has not exited
    continued: bool = False  # it was sent SIGCONT instead of being killed
