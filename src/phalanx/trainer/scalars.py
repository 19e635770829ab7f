"""Send each point of a run's curves to its loggers once, even if steps are lost and repeated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.loggers.guarded import GuardedLoggers


class Scalars:
    """`Scalars` is a checkpoint part: a run that resumes from a checkpoint removes the points logged after it."""

    def __init__(self, loggers: GuardedLoggers) -> None:
        self.loggers = loggers
        self._step = 0
        self._latest: dict[str, float] = {}  # the values of that step

    def add(self, values: Mapping[str, float], step: int) -> None:
        here = self._latest if step == self._step else {}
        new = {name: value for name, value in values.items() if name not in here}  # a step may be repeated
        self._latest, self._step = {**here, **new}, step
        if new:
            self.loggers.log_metrics(new, step)

    def begin(self, again_from: int | None, params: Mapping[str, Any]) -> None:
        """Begin or resume the curves; `params` are the settings, `again_from` the checkpoint's step, 0 without one.

        A logger that can remove points also removes the points of the checkpoint's own step, because a validation may
        have followed the save; the checkpoint's values of that step are logged again.
        """
        self.loggers.begin(again_from, params)
        if self._latest and again_from == self._step:
            self.loggers.log_metrics(self._latest, self._step)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "latest": dict(self._latest), "loggers": self.loggers.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the position of the curves, before the loggers begin."""
        self._step, self._latest = state_dict["step"], dict(state_dict["latest"])
        self.loggers.load_state_dict(state_dict["loggers"])
