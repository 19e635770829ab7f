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
    """A call is seen at these four places: in the caller's thread, and in the one that runs the function."""

    def is_inside(self) -> bool:
        """Whether this thread's calls are part of something that ends with their worker: then none is made again."""

    def on_request(self, to: WorkerAddress, payload: Payload) -> Any:
        """Hear that a call is about to be sent."""

    def receive_request(self, note: Any, arrived: Arrived, caller: WorkerAddress) -> AbstractContextManager[Any]:
        """Hear that a call has arrived; the function runs inside of what this returns."""

    def on_reply(self, to: WorkerAddress, payload: Payload, note: Any) -> Any:
        """Its result is about to be sent to the caller; `note` is the request's. May run in another thread."""

    def receive_reply(self, note: Any, arrived: Arrived, callee: WorkerAddress) -> None:
        """Its result has arrived; `note` is the reply's."""


_hooks: list[CallHook] = []


def set_call_hook(hook: CallHook | None) -> None:
    """Let `hook` take part in all calls from now on; None: nobody does."""
    _hooks[:] = [] if hook is None else [hook]


def call_hook() -> CallHook | None:
    """Who takes part."""
    return _hooks[0] if _hooks else None
