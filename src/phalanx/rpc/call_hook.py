"""A call hook runs in every call. Distributed autograd uses it to record which tensors were sent to which worker.

    caller                                       callee
    on_request(to, payload) -> note   ------->   receive_request(note, arrived, caller), around the function
    receive_reply(note, arrived)      <-------   on_reply(to, payload, note) -> note

A note is any object that can be pickled; None adds no bytes to the message, and the receiver's hook is not called.
`payload.tensors` and `arrived.tensors` are the same tensors in the same order. With a note, received tensors do not
require grad: the hook attaches the tensors that `arrived.requires_grad` marks to an autograd graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from phalanx.rpc.serialization import Payload, ReceivedTensors
from phalanx.rpc.worker_info import WorkerAddress


class CallHook(Protocol):
    """A `CallHook` is called up to four times for each call: twice on the caller and twice on the callee."""

    def on_request(self, to: WorkerAddress, payload: Payload) -> Any:
        """Return the note for a call that is about to be sent."""

    def receive_request(
        self, note: Any, arrived: ReceivedTensors, caller: WorkerAddress
    ) -> AbstractContextManager[Any]:
        """Return a context manager in which the function of a received call runs."""

    def on_reply(self, to: WorkerAddress, payload: Payload, note: Any) -> Any:
        """Return the note for a result that is about to be sent; `note` came with the call. Any thread may run this."""

    def receive_reply(self, note: Any, arrived: ReceivedTensors, callee: WorkerAddress) -> None:
        """Handle a received result; `note` came with the reply."""


_hooks: list[CallHook] = []


def set_call_hook(hook: CallHook | None) -> None:
    """Set the hook for all calls from now on; None for no hook."""
    _hooks[:] = [] if hook is None else [hook]


def call_hook() -> CallHook | None:
    """Return the current hook; None if there is none."""
    return _hooks[0] if _hooks else None
