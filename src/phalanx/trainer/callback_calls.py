"""Call the callbacks of a Trainer at a point of a fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.elastic import generator_states
from phalanx.trainer.callbacks import Callback


class CallbackCalls:
    """`CallbackCalls` isolates the model's random numbers from draws of callbacks.

    A resumed run calls some points again and others not; that must not change any bit.

    Cost: two captures of the random states, where a callback overrides the point; else nothing.
    """

    def __init__(self) -> None:
        self._random = generator_states.GeneratorStates()

    def has_any(self, callbacks: Sequence[Callback], point: str) -> bool:
        return any(_overrides(one, point) for one in callbacks)

    def call(self, callbacks: Sequence[Callback], point: str, *args: Any) -> None:
        """Call the point of each callback that overrides it, in their order."""
        receivers = [one for one in callbacks if _overrides(one, point)]
        if not receivers:
            return
        before = self._random.capture()
        for callback in receivers:
            getattr(callback, point)(*args)
        if self._random.capture() != before:
            generator_states.restore(before)


def _overrides(callback: Callback, point: str) -> bool:
    return point in vars(callback) or getattr(type(callback), point) is not getattr(Callback, point)
