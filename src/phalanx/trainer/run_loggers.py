"""Pass a fit's loggers on to the other ranks where it begins, and give them the report where it ends."""

from __future__ import annotations

import os
import tempfile

from phalanx._base.log import get_logger
from phalanx._job.report import recording
from phalanx.checkpoint.peers import Peers
from phalanx.loggers.guarded import GuardedLoggers

_logger = get_logger(__name__)


def agree_on_runs(loggers: GuardedLoggers, peers: Peers) -> None:
    """Tell every rank the runs that the loggers have begun, as any may become rank 0. All ranks call it."""
    states = [state for state in peers.all_gather(loggers.state_dict()) if state]
    if states:
        loggers.load_state_dict(states[0])


def end_loggers(loggers: GuardedLoggers, error: BaseException | None, *, writes: bool) -> None:
    """Hand the current report to the loggers, if one is recorded, and tell them how the fit has ended."""
    if not (loggers and writes):
        return
    folder = recording.current_folder()
    if folder:
        from phalanx._job.report.page_so_far import write_page_so_far

        with tempfile.TemporaryDirectory() as scratch:
            path = os.path.join(scratch, "report.html")
            try:
                write_page_so_far(folder, path)
            except Exception as problem:  # the fit has done its work, or ends with a reason of its own
                _logger.warning("Trainer: no report for the loggers: %s: %s", type(problem).__name__, problem)
            else:
                loggers.log_file(path)
    loggers.finalize(
        "success" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    )
