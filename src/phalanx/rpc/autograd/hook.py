"""A context notes each call that is made inside of it, by this hook."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import Any

import torch

from phalanx.rpc.autograd.contexts import Context, Contexts
from phalanx.rpc.autograd.graph import make_recv, make_send
from phalanx.rpc.serialization import Arrived, Payload
from phalanx.rpc.worker_info import WorkerAddress


class AutogradHook:
    """`AutogradHook` notes (context, uid of the opening worker, the message's number or None, tensors' ancestors).

    A caller that records nothing (`no_grad`) notes None for the ancestors: its answer comes without a graph, too.
    """

    def __init__(self, contexts: Contexts, me: WorkerAddress) -> None:
        self._contexts = contexts
        self._uid = me.uid
        self._numbers = itertools.count()

    def on_request(self, to: WorkerAddress, payload: Payload) -> Any:
        """Note a call that is about to be sent: its callee belongs to this thread's context from now on."""
        context = self._contexts.current
        if context is None:
            return None
        if to.uid not in context.known and to.uid != self._uid:
            context.known[to.uid] = to
        if context.has_ended:  # this comes after the entry: the end is told to all who are known by then
            return None
        if not torch.is_grad_enabled():
            return context.id, context.origin, None, None
        return self._note(context, to, payload)

    def receive_request(self, note: Any, arrived: Arrived, caller: WorkerAddress) -> AbstractContextManager[Any]:
        """Receive a call: its function runs inside the caller's context."""
        context = self._contexts.meet(note[0], note[1])
        _attach(context, note, arrived)
        return self._contexts.enter(context)

    def on_reply(self, to: WorkerAddress, payload: Payload, note: Any) -> Any:
        """Note a result that is about to be sent. It has its graph, whatever the mode of the thread that sends it."""
        context = None if note[3] is None else self._contexts.meet(note[0], note[1])
        if context is None:
            return None
        with torch.inference_mode(False), torch.enable_grad():
            return self._note(context, to, payload)

    def receive_reply(self, note: Any, arrived: Arrived, callee: WorkerAddress) -> None:
        _attach(self._contexts.get(note[0]), note, arrived)

    def _note(self, context: Context, to: WorkerAddress, payload: Payload) -> Any:
        leaving = [one for one in (*payload.tensors, *payload.sparse) if one.requires_grad]
        made = make_send(leaving, context.id, to.uid, self._uid, next(self._numbers)) if leaving else None
        if made is None:
            return context.id, context.origin, None, ()
        send, ancestors = made
        context.sends[send.message] = send
        return context.id, context.origin, send.message, ancestors


def _attach(context: Context | None, note: Any, arrived: Arrived) -> None:
    context_id, _, message, ancestors = note
    tensors = arrived.that_require_grad()
    if message is not None and context is not None:
        context.received[message] = make_recv(tensors, context_id, message, ancestors)
    else:  # they were sent where nothing was recorded: they are leaves, as outside a context
        for one in tensors:
            one.requires_grad_()
