"""Turn the argument `logger=` into loggers: a name, a wandb run, or an object with Lightning's `log_metrics`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from phalanx.loggers.csv_logger import CSVLogger
from phalanx.loggers.interface import Logger, LogsMetrics
from phalanx.loggers.mlflow_logger import MLflowLogger
from phalanx.loggers.tensorboard_logger import TensorBoardLogger
from phalanx.loggers.wandb_logger import WandbLogger

WORDS: dict[str, Callable[[], Logger]] = {
    "csv": CSVLogger,
    "mlflow": MLflowLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
}


def resolve(given: Any, called: str) -> list[LogsMetrics]:
    """Return the loggers in `given`: none, one, or several in a list. Messages begin with `called`, the caller's name.

    Raises:
        ModuleNotFoundError: a logger's package is not installed; the message names the extra that installs it.
        ValueError, TypeError: `given` is not a logger.
    """
    if given is None or given is False:
        return []
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [logger for one in given for logger in resolve(one, called)]
    return [_resolve_one(given, called)]


def _resolve_one(given: Any, called: str) -> LogsMetrics:
    words = ", ".join(map(repr, WORDS))
    if isinstance(given, str):
        if given not in WORDS:
            raise ValueError(f"{called}: there is no logger {given!r}: give one of {words}, or an object")
        return WORDS[given]()
    if isinstance(given, type):
        raise TypeError(f"{called}: {given.__name__} is a class: give an object, {given.__name__}(...)")
    if isinstance(given, LogsMetrics):
        return given
    if type(given).__module__.partition(".")[0] == "wandb" and hasattr(given, "log"):
        return WandbLogger(run=given)
    raise TypeError(
        f"{called}: a {type(given).__name__} is not a logger: give one of {words}, a run that wandb.init has returned, "
        "or an object with Lightning's log_metrics(metrics, step)"
    )
