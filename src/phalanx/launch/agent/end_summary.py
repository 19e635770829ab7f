"""How a job ended that was stopped, in a line."""

from __future__ import annotations

from phalanx.diagnostics.rank_list import name_ranks
from phalanx.launch.agent.supervision import Supervision
from phalanx.launch.processes import name_signal


def describe_overdue(state: Supervision) -> str:
    """One line on ranks that had to be stopped because the others had ended."""
    return (
        f"phalanx run: {name_ranks(state.overdue)} did not end within "
        f"{state.exit_timeout_s:g} s of the first (--exit-timeout), and had to be "
        f"{'killed' if state.killed else 'stopped'}"
    )


def describe_signal_end(state: Supervision) -> str:
    """One line on how a job ended that was told to stop."""
    assert state.interrupted is not None
    name = name_signal(state.interrupted)
    if not state.killed:
        return f"phalanx run: stopped by {name}"
    ranks = ", ".join(str(rank) for rank in state.killed)
    return (
        f"phalanx run: stopped by {name}; rank{'s' * (len(state.killed) > 1)} {ranks} did not end within "
        f"{state.grace_s:g} s and had to be killed (--grace gives them more)"
    )
