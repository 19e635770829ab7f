"""A `StepEnd` is what ranks do together behind their parts of a step: who fails there leaves nobody waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from phalanx.errors import summary_of
from phalanx.pipeline.edges import StageFailedError, StageLostError
from phalanx.pipeline.execute import Executor
from phalanx.pipeline.outcome import Outcome
from phalanx.pipeline.wire import Wire


class StepEnd:
    """A `StepEnd` ends steps, on which `outcome` agrees; where messages do that, `executor` reports errors.

    `failed` says why an earlier step has failed; it is None if none has.
    """

    def __init__(self, outcome: Outcome, wire: Wire, executor: Executor) -> None:
        self._outcome, self._wire, self._executor = outcome, wire, executor
        self.failed = ""

    def fail(self, error: BaseException) -> None:
        self.failed = summary_of(error).splitlines()[0]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Let the other ranks hear of an error in what all of them do in this block."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            self._outcome.abandon(error)
            if self._outcome.meets_by_messages:
                self._executor.tell_end(error)
                self._wire.leave()
            raise

    def tell_alone(self, failure: Exception, *, has_met: bool) -> None:
        """Tell the others that a peer was lost at the end of a step: they may have missed it, in the next step."""
        is_news = isinstance(failure, (StageFailedError, StageLostError))  # that all have, or get
        if is_news or self._executor.step.failure is not None:
            return
        if self._outcome.meets_by_messages and isinstance(failure, RuntimeError):
            if has_met:
                self._outcome.abandon(failure)
            self._executor.tell_end(failure)
