"""A logger has Lightning's `log_metrics`, and may have other methods of Lightning's loggers or of ours.

    Lightning's   log_hyperparams(params)   log_metrics(metrics, step)   finalize(status)
    ours          begin(again_from)         log_file(path)   flush()     state_dict(), load_state_dict()

Only `log_metrics` is required. The other methods are called if they exist.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from phalanx._base import extras

Params = Mapping[str, Any]


@runtime_checkable
class LogsMetrics(Protocol):
    """A `LogsMetrics` is any object with Lightning's `log_metrics`."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the values of these metrics at `step`."""


class Logger:
    """`Logger` is the base of this package's loggers: all methods but `log_metrics` do nothing unless overridden.

    Every rank may create a logger: it opens nothing before a method is called, and only the writing process calls one.
    """

    def begin(self, again_from: int | None) -> None:
        """Begin, or resume from the checkpoint of step `again_from`.

        `again_from` is 0 if there is no checkpoint yet, and None if the run saves no checkpoints. If possible, remove
        all points from that step on, because they will be logged again.
        """

    def log_hyperparams(self, params: Params) -> None:
        """Log the settings of the run: numbers and strings, and `str` of any other value."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the values of these metrics at a step."""
        raise NotImplementedError

    def log_file(self, path: str) -> None:
        """Store a copy of a file: the run's report."""

    def flush(self) -> None:
        """Write logged values to disk. A run that resumes from the checkpoint saved next does not log them again."""

    def finalize(self, status: str) -> None:
        """End the run with "success", "failed" or "interrupted"; logged values are stored when this returns."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a later job can resume this run."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume the run of an earlier job. It is called before all other methods."""


def require_installed(package: str, *, extra: str, what: str) -> None:
    """Refuse a logger whose package is missing, without importing the package, which only one rank needs.

    Raises:
        ModuleNotFoundError: the package is not installed; the message contains the command that installs it.
    """
    if importlib.util.find_spec(package) is None:
        extras.require(package, extra=extra, what=what)


def as_scalar(value: Any) -> Any:
    """Return a setting in a form that every logger accepts: a number, a bool or a string."""
    return value if isinstance(value, bool | int | float | str) else str(value)
