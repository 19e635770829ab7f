"""Write a run of the user's own loop to loggers: metrics as they arrive, the loss curve and the report at the end."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from phalanx._base.processes import observe_uncaught
from phalanx._job.report import recording
from phalanx._job.report.write import write_page_so_far
from phalanx.loggers.guarded import GuardedLoggers
from phalanx.loggers.resolve import resolve


class RunLoggers:
    """`RunLoggers` are the loggers that rank 0 writes to until the report ends; every rank creates them.

    When the process ends, or begins another report, the loggers receive the loss curve and the report page so far. The
    complete page is the one that the launcher writes into the report's folder afterwards.
    """

    def __init__(self, given: Any, hyperparameters: Mapping[str, Any]) -> None:
        self._loggers = GuardedLoggers(resolve(given, "phalanx.report.begin: logger"), self._writes)
        self._status = "success"
        self._step = 0
        self._loggers.begin(None, hyperparameters)
        observe_uncaught(self._note_failure)
        # Registered after the loggers' own exit functions, so that this runs first.
        self._pid = os.getpid()
        atexit.register(self._finish)
        recording.before_end(self._finish)

    @staticmethod
    def _writes() -> bool:
        recorder = recording.current()
        return recorder is not None and recorder.rank_now() == 0

    def log(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Log values of this rank at `step`, by default the number of recorded steps."""
        recorder = recording.current()
        self._step = step if step is not None else 0 if recorder is None else int(recorder.num_steps)
        self._loggers.log_metrics({name: float(value) for name, value in metrics.items()}, self._step)

    def _note_failure(self, error: BaseException) -> None:
        self._status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"

    def _finish(self) -> None:
        """Log the final values, once; forked children do nothing."""
        if self not in _run_loggers:
            return
        _run_loggers.remove(self)
        if os.getpid() != self._pid or not self._writes():
            return
        folder = recording.current_folder()
        with tempfile.TemporaryDirectory() as scratch:
            path = os.path.join(scratch, "report.html")
            try:
                run = write_page_so_far(folder, path)
            except Exception as error:  # a report that fails must not fail the program
                print(f"phalanx.report: no page for the logger: {error}", file=sys.stderr)
            else:
                for step, loss in run.loss:
                    self._loggers.log_metrics({"train/loss": loss}, int(step))
                self._loggers.log_file(path)
        self._loggers.finalize(self._status)


_run_loggers: list[RunLoggers] = []  # the loggers of this process's report: one, or none


def begin_loggers(given: Any, hyperparameters: Mapping[str, Any] | None) -> None:
    """Start the loggers, once per report; further calls do nothing."""
    if given is not None and not _run_loggers:
        _run_loggers.append(RunLoggers(given, dict(hyperparameters or {})))


def log(metrics: Mapping[str, float], step: int | None) -> None:
    """Log the metrics, if there are loggers."""
    for one in _run_loggers:
        one.log(metrics, step)
