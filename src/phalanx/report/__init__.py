"""A report shows people what a run has left behind: where its time went, what happened, and what to do about it.

`phalanx run --report DIR` and `phalanx.Trainer(report=DIR)` need nothing of this. A loop of your own, of which they see
too little, says where it is:

    phalanx.report.begin("runs/a")                # unless the launcher was given --report
    for batch in my_loader:                       # with torch's DataLoader, backward and optimizers it is seen
        with phalanx.report.phase("forward"):
            ...
        phalanx.report.step(samples=64, loss=loss)
        phalanx.report.log({"accuracy": accuracy})  # to the loggers that `begin` was given
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
    """Record this process's steps for a report in `folder`; every rank calls it, before its first step.

    Under `phalanx run` the launcher writes the report at the end, also when ranks have died; under another launcher, or
    none, rank 0 writes it when it ends. If `phalanx run --report` was given a folder, that one is used.

    Arguments:
        logger: one, or several, as of `phalanx.Trainer`: rank 0 gives them what `log` is called with, and at its end
            the curve of the loss and the report.
        hyperparameters: for the loggers.

    Raises:
        OSError: the folder can't be written.
        ModuleNotFoundError, ValueError, TypeError: a logger's package is not installed, or it is none.
    """
    from phalanx._job.report.recording import begin as begin_recording

    begin_recording(folder)
    if logger is not None:
        from phalanx.report.run_loggers import begin_loggers

        begin_loggers(logger, hyperparameters)


def log(metrics: Mapping[str, float], step: int | None = None) -> None:
    """Give the loggers of this run the values of metrics; only what rank 0 gives is logged.

    Without `step` it is the number of steps this process has recorded. It does nothing if `begin` got no logger.
    """
    import sys

    run_loggers = sys.modules.get("phalanx.report.run_loggers")  # else nobody has given one
    if run_loggers is not None:
        run_loggers.log(metrics, step)


def phase(
    name: Literal["data", "forward", "backward", "update", "other"],
) -> contextlib.AbstractContextManager[None]:
    """Count what runs inside as this part of the step. It does nothing if nothing is recorded.

    Raises:
        ValueError: there is no such part.
    """
    recorder = _current()
    return contextlib.nullcontext() if recorder is None else recorder.phase(name)


def step(*, samples: float | None = None, loss: SupportsFloat | None = None) -> None:
    """End a step here, which had so many samples of this rank. It does nothing if nothing is recorded.

    It waits for a loss on an accelerator.
    """
    recorder = _current()
    if recorder is not None:
        recorder.step(samples, None if loss is None else float(loss))


def _current() -> StepRecorder | None:
    import sys

    recording = sys.modules.get("phalanx._job.report.recording")  # else nobody has begun
    return None if recording is None else recording.current()
