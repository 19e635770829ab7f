"""Report a run: where its time went, what happened, and what to do about it.

`phalanx run --report DIR` and `phalanx.Trainer(report=DIR)` do not need this module. With it, your own training loop
reports its phases:

    phalanx.report.begin("runs/a")                # not needed under `phalanx run --report`
    for batch in my_loader:                       # torch's DataLoader, backward and optimizers are timed anyway
        with phalanx.report.phase("forward"):
            ...
        phalanx.report.step(samples=64, loss=loss)
        phalanx.report.log({"accuracy": accuracy})  # to the loggers that were passed to `begin`
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

if TYPE_CHECKING:
    from phalanx._comm.diagnostics.step_recorder import StepRecorder

__all__ = ["begin", "log", "phase", "step"]


def begin(
    folder: str | os.PathLike[str], *, logger: Any = None, hyperparameters: Mapping[str, Any] | None = None
) -> None:
    """Record this process's steps for a report in `folder`. Every rank calls it, before its first step.

    Under `phalanx run` the launcher writes the report at the end, even if ranks have died. Under another launcher, or
    none, rank 0 writes the report when its process ends. The folder of `phalanx run --report` overrides `folder`.

    Arguments:
        logger: one logger or several, as for `phalanx.Trainer`. Rank 0 logs the values passed to `log`, and, when its
            process ends, the loss curve and the report.
        hyperparameters: for the loggers.

    Raises:
        OSError: the folder can't be written.
        ModuleNotFoundError, ValueError, TypeError: a logger's package is not installed, or `logger` is invalid.
    """
    from phalanx._job.report.recording import begin as begin_recording

    begin_recording(folder)
    if logger is not None:
        from phalanx.report.run_loggers import begin_loggers

        begin_loggers(logger, hyperparameters)


def log(metrics: Mapping[str, float], step: int | None = None) -> None:
    """Log metrics with the loggers of this run; only rank 0's metrics are logged.

    `step` defaults to the number of steps that this process has recorded. Do nothing if `begin` got no logger.
    """
    import sys

    run_loggers = sys.modules.get("phalanx.report.run_loggers")  # otherwise no logger was passed
    if run_loggers is not None:
        run_loggers.log(metrics, step)


def phase(
    name: Literal["data", "forward", "backward", "update", "other"],
) -> contextlib.AbstractContextManager[None]:
    """Count the time inside the `with` block as this phase of the step. Do nothing if nothing is recorded.

    Raises:
        ValueError: the name is unknown.
    """
    recorder = _current()
    return contextlib.nullcontext() if recorder is None else recorder.phase(name)


def step(*, samples: float | None = None, loss: SupportsFloat | None = None) -> None:
    """End a step with `samples` samples of this rank. Do nothing if nothing is recorded.

    A loss on an accelerator makes this wait for the device.
    """
    recorder = _current()
    if recorder is not None:
        recorder.step(samples, None if loss is None else float(loss))


def _current() -> StepRecorder | None:
    import sys

    recording = sys.modules.get("phalanx._job.report.recording")  # otherwise no recording has begun
    return None if recording is None else recording.current()
