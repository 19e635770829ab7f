"""Guard a run's loggers: only the writing process calls them, and their failures never end the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx._base.log import get_logger
from phalanx.loggers.interface import Logger, LogsMetrics, Params

_logger = get_logger(__name__)

_MOST_IN_A_ROW = 3


class GuardedLoggers:
    """`GuardedLoggers` passes each call to the loggers that have its method, if this process `writes`.

    `writes` is called each time, since this process may become rank 0. The first failure of a logger is logged. After
    three failures in a row, a logger is no longer called, because each call may wait for its server's timeout.
    """

    def __init__(self, loggers: Sequence[LogsMetrics], writes: Callable[[], bool]) -> None:
        self._loggers, self._writes = list(loggers), writes
        self._failures: dict[int, int] = {}  # failures in a row, by position
        self._reported: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def begin(self, again_from: int | None, params: Params) -> None:
        """Begin, or resume from the checkpoint of step `again_from`, with these settings (see `Logger.begin`)."""
        self._call("begin", again_from)
        self._call("log_hyperparams", dict(params))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._call("log_metrics", dict(metrics), step)

    def log_file(self, path: str) -> None:
        self._call("log_file", path)

    def flush(self) -> None:
        """Write logged values to disk."""
        self._call("flush")

    def finalize(self, status: str) -> None:
        """End the run with "success", "failed" or "interrupted"."""
        self._call("save")  # a method of Lightning's loggers that writes buffered values
        self._call("finalize", status)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which this package's loggers resume their runs; empty before they have begun."""
        ours = [(i, one) for i, one in enumerate(self._loggers) if isinstance(one, Logger)]
        states = {f"{type(one).__name__} {i}": one.state_dict() for i, one in ours}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume the runs of another process, or of an earlier job."""
        for i, one in enumerate(self._loggers):
            if isinstance(one, Logger) and (state := state_dict.get(f"{type(one).__name__} {i}")):
                one.load_state_dict(state)

    def _call(self, name: str, *args: Any) -> None:
        if not (self._loggers and self._writes()):
            return
        for i, one in enumerate(self._loggers):
            method = getattr(one, name, None)
            if not callable(method) or self._failures.get(i, 0) >= _MOST_IN_A_ROW:
                continue
            try:
                method(*args)
            except NotImplementedError:
                pass  # Lightning's loggers raise it for unsupported values
            except Exception as error:
                self._failures[i] = self._failures.get(i, 0) + 1
                if i not in self._reported:
                    self._reported.add(i)
                    _logger.warning(
                        "%s.%s failed: %s: %s. Training continues; these records are lost. A logger that fails "
                        "%d times in a row is not called again.",
                        type(one).__name__, name, type(error).__name__, error, _MOST_IN_A_ROW,
                    )  # fmt: skip
            else:
                if name != "flush":  # which most loggers leave empty, so it succeeds even without the server
                    self._failures.pop(i, None)
