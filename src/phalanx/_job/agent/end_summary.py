"""Say in a line how a job ended that was stopped."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx._base.processes import name_signal
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._job.agent.elastic_actions import LostRank
from phalanx._job.agent.supervision import Supervision

_MAX_LINES = 12
_MAX_PLACES = 3  # the line on a job that the user has stopped names at most so many places


def describe_losses(losses: Sequence[LostRank]) -> str:
    """Return the ranks that an elastic job has lost, the first in front; of many those in the middle are left out."""
    lines = [
        f"  rank {lost.rank} (pid {lost.pid}){f' on {lost.host}' if lost.host else ''}"
        f"{f' after step {lost.step}' if lost.step >= 0 else ''}: {lost.why}"
        f"{'; replaced' if lost.replaced else '; not replaced'}"
        for lost in losses
    ]
    if len(lines) > _MAX_LINES:
        half = _MAX_LINES // 2
        lines[half:-half] = [f"  … {len(lines) - 2 * half} more …"]
    count = f"{len(losses)} rank{'s were' if len(losses) > 1 else ' was'} lost during the run:"
    return "\n".join([f"phalanx run: {count}", *lines])


def describe_overdue(state: Supervision) -> str:
    """Return one line on ranks that had to be stopped because the others had ended."""
    return (
        f"phalanx run: {name_ranks(state.overdue)} did not end within "
        f"{state.exit_timeout_s:g} s of the first (--exit-timeout), and had to be "
        f"{'killed' if state.killed else 'stopped'}"
    )


def describe_signal_end(state: Supervision, *, traceback: bool = False) -> str:
    """Return one line on how a stopped job ended; `traceback`: the ranks' stacks were shown before."""
    assert state.interrupted is not None
    name = name_signal(state.interrupted)
    if not state.killed:
        return f"phalanx run: stopped by {name}{'' if traceback else _describe_places(state)}"
    ranks = ", ".join(str(rank) for rank in state.killed)
    return (
        f"phalanx run: stopped by {name}; rank{'s' * (len(state.killed) > 1)} {ranks} did not end within "
        f"{state.grace_s:g} s and had to be killed (--shutdown-timeout gives them more)"
    )


def _describe_places(state: Supervision) -> str:
    """Return where the ranks were when the user's signal came, as far as they have told it."""
    places: dict[str, list[int]] = {}
    for rank, report in sorted(state.reports.items()):
        if report.place and state.is_stopped_by_user(report):
            places.setdefault(report.place, []).append(rank)
    if not places:
        return ""
    told = [f"{name_ranks(ranks)} at {place}" for place, ranks in list(places.items())[:_MAX_PLACES]]
    more = f", {len(places) - _MAX_PLACES} more places" if len(places) > _MAX_PLACES else ""
    return f"; {', '.join(told)}{more} (--traceback shows tracebacks)"
