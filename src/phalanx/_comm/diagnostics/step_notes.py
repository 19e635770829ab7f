"""Record facts about a step that only a feature knows: its waits for other ranks, and the loss.

The step recorder is the listener; without a listener, nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from phalanx._comm.diagnostics.step_machine import END_WAIT


class _Listener(Protocol):
    def mark(self, kind: float, value: float = 0.0) -> None: ...

    def add_facts(self, **facts: Any) -> None: ...

    def read_loss(self, loss: Any) -> float | None: ...

    def note_loss(self, loss: float | None) -> None: ...


_listeners: list[_Listener] = []  # one or none
_reported: set[str] = set()


def listen(listener: _Listener) -> None:
    """Set the listener, replacing the previous one."""
    _listeners[:] = [listener]
    _reported.clear()


def stop_listening() -> None:
    """Remove the listener."""
    _listeners.clear()


def note_wait(seconds: float, on: Literal["stages", "servers"]) -> None:
    """Record a wait of this rank, until now, for other stages of its pipeline, or for parameter servers."""
    for listener in _listeners:
        if on not in _reported:
            _reported.add(on)
            listener.add_facts(waits_for=sorted(_reported))
        listener.mark(END_WAIT, seconds)


@contextmanager
def waiting_for(on: Literal["stages", "servers"]) -> Iterator[None]:
    """Count the time of the block as a wait."""
    began = time.monotonic()
    try:
        yield
    finally:
        note_wait(time.monotonic() - began, on)


def note_loss(loss: Any) -> None:
    """Record a tensor as the step's loss, for a step that does not call `backward` on it."""
    for listener in _listeners:
        if (value := listener.read_loss(loss)) is not None:
            listener.note_loss(value)
