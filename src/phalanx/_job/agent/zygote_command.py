"""Plan the code that starts a zygote, for the agent and for a zygote that restarts itself."""

from __future__ import annotations

from collections.abc import Sequence

# Run by `python -c`, so that as few frames as possible are below the script's. The empty entry of sys.path is the
# working directory, which must not shadow modules (the user's `random.py`) while torch is imported.
_BOOT = (
    "import sys; '' in sys.path and sys.path.remove(''); "
    "from phalanx._job.agent.zygote import main; "
    "main({control}, {agent}, {preload}, {warm}, {sessions}, {reports_death})"
)


def plan_zygote_code(
    control: int, agent: int, *, preload: bool, warm: bool, sessions: Sequence[int], reports_death: bool
) -> str:
    """Return the code for `python -c`, which calls `zygote.main` with these arguments."""
    return _BOOT.format(
        control=control,
        agent=agent,
        preload=preload,
        warm=warm,
        sessions=tuple(sessions),
        reports_death=reports_death,
    )
