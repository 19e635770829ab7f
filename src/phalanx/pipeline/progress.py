"""`StepProgress` tracks how far this rank is in a step, and how the step has failed here: states and transitions.

  idle ──begin──▶ begun ──act──▶ acting ──wait_for──▶ waiting ──has_come──▶ acting ──act──▶ … ──end──▶ done
                    │              │                    │                                               │
                    │ refused      │ it fails           │ the awaited one has failed, or is lost        │ a peer is lost
                    ▼              ▼                    ▼                                               ▼ where all meet
                    └──────────────┴──────▶ failed: all who may wait for this rank have been told ◀─────┘

`begin` leads from every state to begun, and `forget` to idle.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from phalanx.pipeline.schedule import Action, Schedule

Phase = Literal["idle", "begun", "acting", "waiting", "done", "failed"]


@dataclass(frozen=True)
class StepFailure:
    """A `StepFailure` describes how a step has failed on this rank."""

    leaves: bool
    """Whether this rank can't meet the others: it was interrupted, or its group is broken."""


class StepProgress:
    """`StepProgress` is the current or last step of one rank."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the remains of a failed step."""
        self._clear("idle")

    def begin(self) -> None:
        """Begin a step, in which nothing has failed yet."""
        self._clear("begun")

    def _clear(self, phase: Phase) -> None:
        self.phase: Phase = phase
        self.schedule: Schedule | None = None
        self.at: Action | None = None
        """The action in progress, or in progress when the step failed."""
        self.turn = 0.0
        """The time since which the action could have run, in seconds of `time.perf_counter`."""
        self.awaited: int | None = None
        """The stage whose message is awaited, or was when the step failed."""
        self.failure: StepFailure | None = None

    def act(self, action: Action) -> None:
        """Begin `action`, whose turn it is."""
        assert self.phase in ("begun", "acting"), self.phase
        self.phase, self.at, self.turn = "acting", action, time.perf_counter()

    def wait_for(self, stage: int) -> None:
        """Begin to wait for a message of `stage`."""
        assert self.phase == "acting", self.phase
        self.phase, self.awaited = "waiting", stage

    def has_come(self) -> None:
        """Continue after the awaited message has arrived."""
        self.phase, self.awaited = "acting", None

    @contextlib.contextmanager
    def talk_to(self, stage: int) -> Iterator[None]:
        """Run the body, which waits for no rank, and fail at once if `stage` is known to be lost."""
        try:
            yield
        except RuntimeError:
            self.phase, self.awaited = "waiting", stage
            raise

    def end(self) -> None:
        """Record that the last action is complete."""
        assert self.phase == "acting", self.phase
        self.phase = "done"

    def refuse(self) -> None:
        """Record that the failure belongs to no action, but happened before the first or after the last one."""
        self.at = self.awaited = self.schedule = None

    def fail(self, failure: StepFailure) -> None:
        """Record how the step has failed, and that the waiting ranks are being notified."""
        self.phase, self.failure = "failed", failure
