"""A call hook takes part in every call: a distributed backward notes with it which tensors went where.

    caller                                       callee
    on_request(to, payload) -> note   ------->   receive_request(note, arrived, caller), around the function
    receive_reply(note, arrived)      <-------   on_reply(to, payload, note) -> note

A note is anything that pickle takes; None travels at no cost. `payload.tensors` and `arrived.tensors` are the same
tensors in the same order. If a note came with them, they arrive without requiring grad: the code that reads the note
attaches them to a graph (`arrived.requires_grad` says which).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from phalanx.rpc.serialization import Arrived, Payload
from phalanx.rpc.worker_info import WorkerAddress


class CallHook(Protocol):
    """`CallHook` sees each call at four places: in the caller's thread, and in the one that runs the function."""

    def on_request(self, to: WorkerAddress, payload: Payload) -> Any:
        """Return the note for a call that is about to be sent."""

    def receive_request(self, note: Any, arrived: Arrived, caller: WorkerAddress) -> AbstractContextManager[Any]:
        """Return a context manager in which the function of a call that has arrived runs."""

    def on_reply(self, to: WorkerAddress, payload: Payload, note: Any) -> Any:
        """Return the note for a result that is about to be sent; `note` is the request's. May run in another thread."""

    def receive_reply(self, note: Any, arrived: Arrived, callee: WorkerAddress) -> None:
        """Receive a result that has arrived; `note` is the reply's."""


_hooks: list[CallHook] = []


def set_call_hook(hook: CallHook | None) -> None:
    """Set the hook that takes part in all calls from now on; with None, no hook does."""
    _hooks[:] = [] if hook is None else [hook]


def call_hook() -> CallHook | None:
    """Return the hook that takes part in calls; None if there is none."""
    return _hooks[0] if _hooks else None
