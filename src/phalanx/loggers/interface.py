"""A logger must have Lightning's `log_metrics`, and may have more of Lightning's methods or of ours.

    Lightning's   log_hyperparams(params)   log_metrics(metrics, step)   finalize(status)
    ours          begin(again_from)         log_file(path)   flush()     state_dict(), load_state_dict()

`log_metrics` is all that a logger must have. The others are called where they are there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from phalanx._base import extras

Params = Mapping[str, Any]


@runtime_checkable
class LogsMetrics(Protocol):
    """It has Lightning's `log_metrics`."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the values of these metrics at a step."""


class Logger:
    """It is the base of this package's loggers: everything but `log_metrics` does nothing unless it is overridden.

    A logger opens nothing before its first call, which only the process that writes makes: every rank may make one.
    """

    def begin(self, again_from: int | None) -> None:
        """Begin, or go on from the checkpoint of the step `again_from`.

        It is 0 if there was no checkpoint, and None if the run keeps none. Forget all points from that step on, where
        that is possible: they come again.
        """

    def log_hyperparams(self, params: Params) -> None:
        """Take the settings of the run; numbers, words and what `str` makes words of."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the values of these metrics at a step."""
        raise NotImplementedError

    def log_file(self, path: str) -> None:
        """Take a copy of a file: the run's report."""

    def flush(self) -> None:
        """Write what was logged to the disk, before a checkpoint: whoever goes on from it does not log it again."""

    def finalize(self, status: str) -> None:
        """End the run, with "success", "failed" or "interrupted"; what was logged is kept when this returns."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a later job needs to go on with the same run."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the run of an earlier job. This comes before the first call of the others."""


def require_installed(package: str, *, extra: str, what: str) -> None:
    """Refuse a logger whose package is missing, without the time that its import takes: only one rank imports it.

    Raises:
        ModuleNotFoundError: it is not installed; with the command that installs it.
    """
    if importlib.util.find_spec(package) is None:
        extras.require(package, extra=extra, what=what)


def as_scalar(value: Any) -> Any:
    """Return a setting as every logger takes it: a number, a bool or a string."""
    return value if isinstance(value, bool | int | float | str) else str(value)
