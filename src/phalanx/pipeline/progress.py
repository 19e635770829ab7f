"""`StepProgress` records how far a step of a pipeline has progressed on this rank.

    IDLE ──► STARTED ──► ACTING ──► COMPLETED ──► AGREED ──► STARTED, for the next step
                          ▲  │
                          │  ▼
                        WAITING

    phase       this rank                                               next
    IDLE        has run no step                                         STARTED
    STARTED     has yet to begin its first action                       ACTING, FAILED, LEFT
    ACTING      runs an action                                          ACTING, WAITING, COMPLETED, FAILED, LEFT
    WAITING     waits for a message from another stage                  ACTING, FAILED, LEFT
    COMPLETED   has run its actions; the ranks now agree on the result  AGREED, ABORTED, FAILED, LEFT
    AGREED      knows that every rank has run its actions               STARTED, LEFT
    FAILED      has failed, has notified the ranks that wait for it,    ABORTED, LEFT
                and takes part in the agreement
    LEFT        takes no part in the agreement or in what follows:      none
                it was interrupted, or a rank is lost
    ABORTED     knows, as all ranks do, that the step has failed        none

No step can follow the last three phases: messages of the failed step may still be in flight.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Set
from enum import Enum

from phalanx.errors import summary_of
from phalanx.pipeline.schedule import Action, PipelineSchedule


class StepPhase(Enum):
    """A `StepPhase` is where a rank is in a step; the module's table shows the transitions."""

    IDLE = "idle"
    STARTED = "started"
    ACTING = "acting"
    WAITING = "waiting"
    COMPLETED = "completed"
    AGREED = "agreed"
    FAILED = "failed"
    LEFT = "left"
    ABORTED = "aborted"


_FAILING = (StepPhase.FAILED, StepPhase.LEFT)
FAILURES = (*_FAILING, StepPhase.ABORTED)
TRANSITIONS: Mapping[StepPhase, Set[StepPhase]] = {
    StepPhase.IDLE: {StepPhase.STARTED},
    StepPhase.STARTED: {StepPhase.ACTING, *_FAILING},
    StepPhase.ACTING: {StepPhase.ACTING, StepPhase.WAITING, StepPhase.COMPLETED, *_FAILING},
    StepPhase.WAITING: {StepPhase.ACTING, *_FAILING},
    StepPhase.COMPLETED: {StepPhase.AGREED, StepPhase.ABORTED, *_FAILING},
    StepPhase.AGREED: {StepPhase.STARTED, StepPhase.LEFT},
    StepPhase.FAILED: {StepPhase.ABORTED, StepPhase.LEFT},
    StepPhase.LEFT: set(),
    StepPhase.ABORTED: set(),
}


class StepProgress:
    """`StepProgress` records the current or last step of one rank."""

    def __init__(self) -> None:
        self.phase = StepPhase.IDLE
        self.reason = ""
        """The first line of the error with which a step failed."""
        self._clear()

    def _clear(self) -> None:
        self.schedule: PipelineSchedule | None = None
        self.at: Action | None = None
        """The action in progress, or in progress when the step failed."""
        self.turn = 0.0
        """The time at which the action began, in seconds of `time.perf_counter`."""
        self.awaited: int | None = None
        """The stage whose message is awaited, or was awaited when the step failed."""

    def _become(self, phase: StepPhase) -> None:
        assert phase in TRANSITIONS[self.phase], (self.phase, phase)
        self.phase = phase

    @property
    def has_failed(self) -> bool:
        return self.phase in FAILURES

    @property
    def may_start(self) -> bool:
        """Return whether another step may start: none may after a step that failed or was interrupted."""
        return StepPhase.STARTED in TRANSITIONS[self.phase]

    # -- actions -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a step."""
        self._become(StepPhase.STARTED)
        self._clear()

    def act(self, action: Action) -> None:
        """Record that `action` begins."""
        self._become(StepPhase.ACTING)
        self.at, self.turn = action, time.perf_counter()

    @contextlib.contextmanager
    def waiting_for(self, stage: int) -> Iterator[None]:
        """Record that the body waits for a message from `stage`."""
        self._become(StepPhase.WAITING)
        self.awaited = stage
        yield
        self._become(StepPhase.ACTING)
        self.awaited = None

    @contextlib.contextmanager
    def sending_to(self, stage: int) -> Iterator[None]:
        """Run the body, which does not block; if it raises because `stage` is lost, record `stage` as awaited."""
        try:
            yield
        except RuntimeError:
            self._become(StepPhase.WAITING)
            self.awaited = stage
            raise

    def complete(self) -> None:
        """Record that the last action is complete."""
        self._become(StepPhase.COMPLETED)

    def agree(self) -> None:
        """Record that every rank has completed its actions."""
        self._become(StepPhase.AGREED)

    # -- failures ------------------------------------------------------------------------------------------------

    def forget_action(self) -> None:
        """Record that a failure belongs to no action: it happened before the first one or after the last one."""
        self.at = self.awaited = self.schedule = None

    def fail(self, error: BaseException, *, leaves: bool) -> None:
        """Record the error of this rank; with `leaves`, the rank takes no part in the agreement."""
        self._become(StepPhase.LEFT if leaves else StepPhase.FAILED)
        self.give_reason(error)

    def leave(self, error: BaseException) -> None:
        """Record that this rank takes no part in the agreement or in anything after it."""
        if self.phase is not StepPhase.LEFT:
            self.fail(error, leaves=True)

    def abort(self) -> None:
        """Record that the step has failed and that every rank knows it."""
        if self.phase is not StepPhase.ABORTED:  # the ranks agree first, then the replicas
            self._become(StepPhase.ABORTED)

    def give_reason(self, error: BaseException) -> None:
        """Record `error` as the reason of the failure, unless an earlier error is recorded."""
        self.reason = self.reason or summary_of(error).splitlines()[0]
