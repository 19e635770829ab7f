"""`RankFailed` is the one exception that reports all the failed ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._job.launch.calls.outcome import RankOutcome
from phalanx.errors import PhalanxError


class RankFailed(PhalanxError):
    """Some ranks of a `run_ranks` did not return. The message has each one's traceback or last known place.

    `errors` maps a rank to the exception that it raised, where that can be pickled; `results` maps the ranks that
    returned to what they returned; `running` names the ranks that were still running when time was up.
    """

    def __init__(
        self,
        message: str,
        *,
        errors: dict[int, BaseException] | None = None,
        results: dict[int, Any] | None = None,
        running: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.errors = errors or {}
        self.results = results or {}
        self.running = running

    @classmethod
    def of(cls, outcomes: Sequence[RankOutcome], *, call: str, timeout_s: float) -> RankFailed:
        """Return the exception that reports every failed outcome, in the order of the ranks."""
        failed = [outcome for outcome in outcomes if outcome.failed]
        running = tuple(outcome.rank for outcome in failed if outcome.running)
        late = f", {name_ranks(running)} still running after {timeout_s:.1f} s" if running else ""
        title = f"{call} on {len(outcomes)} ranks: {name_ranks([o.rank for o in failed])} did not return{late}."
        return cls(
            "\n\n".join([title, *(f"--- rank {o.rank}: {o.text.rstrip()}" for o in failed)]),
            errors={o.rank: o.error for o in failed if o.error is not None},
            results={o.rank: o.result for o in outcomes if not o.failed},
            running=running,
        )
