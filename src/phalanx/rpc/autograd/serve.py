"""An `AutogradWorker` exchanges the messages of contexts and backward passes with other workers."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import ClosedError, PeerLostError, PhalanxError, message_of
from phalanx.rpc import current
from phalanx.rpc.agent import interrupts
from phalanx.rpc.agent.agent import Agent
from phalanx.rpc.autograd import orders
from phalanx.rpc.autograd.contexts import Context, Contexts
from phalanx.rpc.autograd.graph import GraphEnds, MessageId, make_recv, make_send
from phalanx.rpc.autograd.orders import PassId
from phalanx.rpc.autograd.passes import OutgoingGradients, Pass, nothing
from phalanx.rpc.call_hook import set_call_hook
from phalanx.rpc.serialization import Payload, ReceivedTensors
from phalanx.rpc.wire import Frame, Order
from phalanx.rpc.worker_info import WorkerAddress

_SHORT_S = 300e-6
_WEIGHT = 0.2  # of a duration that is longer than the moving average; a shorter one replaces the average


class AutogradWorker:
    """An `AutogradWorker` runs this worker's part of distributed autograd."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.me = agent.me
        self.contexts = Contexts(agent.me.info.id, agent.me.uid)
        self._took_s = math.inf  # the moving average of the durations of this worker's parts
        self._numbers = itertools.count()
        agent.orders[Order.GRADIENTS] = self._on_message
        agent.controls["autograd.abort"] = self._abort
        agent.controls["autograd.release"] = self._on_release
        agent.on_lost.append(self._lose)
        agent.on_close.append(self._close)
        set_call_hook(AutogradHook(self.contexts, agent.me))

    # -- contexts ------------------------------------------------------------------------------------------------------

    def release(self, context_id: int) -> None:
        """Release a context that has ended, and notify every worker that received it from this one."""
        context = self.contexts.release(context_id)
        if context is None:
            return
        error = PhalanxError(f"Could not find autograd context with id: {context_id}. It ended during its backward.")
        for one in list(context.passes.values()):
            one.fail(error)
        for member in list(context.known.values()):
            if not self.agent.closed:
                self.agent.notify(member, "autograd.release", context_id)

    def _on_release(self, sender: WorkerAddress, context_id: int) -> None:
        self.release(context_id)

    # -- a pass of this worker -----------------------------------------------------------------------------------------

    def backward(self, context: Context, roots: Sequence[Tensor], reached: GraphEnds, retain_graph: bool) -> None:
        """Run the backward pass from `roots` on all workers; if it fails, raise the first error after all have ended.

        `reached` are the ends of the graph on this worker.
        """
        run = self._pass(context, (self.me.uid, next(self._numbers)))
        plans: dict[int, list[tuple[MessageId, int]]] = {}
        for planned in sorted(reached.ancestors(context.id).items(), reverse=True):
            plans.setdefault(planned[0][1], []).append(planned)
        mine = plans.pop(self.me.uid, [])
        others = {uid: self._member(uid, context) for uid in plans}
        begun = run.begun

        def begin(
            uid: int, first: MessageId = orders.NO_MESSAGE, gradients: Sequence[Tensor | None] | None = None
        ) -> None:
            to = others[uid]
            data, buffers = orders.write(to, context.id, run.id, first, gradients, plans[uid], retain_graph)
            # otherwise Ctrl-C could interrupt after the message is sent and before `begun` records it
            interrupts.defer()
            try:
                begun[uid] = self.agent.order(to, "backward", data, buffers, 0.0, read=partial(_read_end, run))
                begun[uid].on_done(run.on_other_done)
            finally:
                interrupts.allow()

        def begin_others(message: MessageId | None = None) -> None:
            for uid in others:
                if uid not in begun and (message is None or plans[uid][0][0][0] > message[0]):
                    begin(uid)

        def send(run: Pass, message: MessageId, gradients: Sequence[Tensor | None]) -> None:
            if message[1] in others and message[1] not in begun:
                begin(message[1], message, gradients)
            else:
                self.send_gradients(run, message, gradients)

        run.num_others = len(others)
        run.begin_others, run.send_gradients = begin_others, send
        try:
            try:
                run.run(roots, reached, mine, retain_graph)
            except BaseException as error:
                run.fail(run.explain(error))
            begin_others()
            run.wait_others()
            if run.error is not None:
                for member in others.values():
                    self.agent.notify(member, "autograd.abort", (context.id, run.id, message_of(run.error)))
                run.wait_all_others()
                raise run.error
        finally:
            context.passes.pop(run.id, None)
            begun.clear()  # break reference cycles: the calls refer to the pass
            run.error = None
            run.begin_others, run.send_gradients = nothing, self.send_gradients  # these closures refer to the pass

    def _member(self, uid: int, context: Context) -> WorkerAddress:
        member = self.agent.membership.by_uid(uid)
        if member is None:
            lost = context.known.get(uid)
            who = "a worker that took part" if lost is None else f"{lost}"
            why = "" if lost is None else f": {self.agent.peer(lost).lost}"
            ranks = () if lost is None else (lost.info.id,)
            raise PeerLostError(
                f"backward of context {context.id}: {who} is lost{why}\nIts part of the graph is lost with it: run the "
                "forward again, without that worker.",
                ranks=ranks,
            )
        return member

    # -- a pass of another worker --------------------------------------------------------------------------------------

    def _pass(self, context: Context, pass_id: PassId) -> Pass:
        found: Pass | None = context.passes.get(pass_id)
        return context.passes.setdefault(pass_id, Pass(context, pass_id, self)) if found is None else found

    def timed(self, part: Callable[[bool], None]) -> None:
        begin = time.perf_counter()
        part(self._took_s < _SHORT_S)
        took_s = min(time.perf_counter() - begin, 10 * _SHORT_S)
        self._took_s = took_s if self._took_s > took_s else self._took_s + _WEIGHT * (took_s - self._took_s)

    def _on_message(self, connection: Any, frame: Frame) -> None:
        try:
            message = orders.read(frame)
        except BaseException as error:
            if frame.call:  # the caller receives the error
                raise
            context_id, pass_id = orders.read_pass(frame)
            context = self.contexts.get(context_id)
            if context is not None:  # fail the pass, which would otherwise wait forever for these gradients
                run = self._pass(context, pass_id)
                run.fail(run.explain(error))
            return
        if message.plan is not None:
            run = self._pass(self.contexts.find(message.context_id), message.pass_id)
            run.begin((connection, frame.call), message.plan, message.retain_graph, message.message, message.gradients)
        elif message.gradients is not None:
            context = self.contexts.get(message.context_id)
            if context is not None:
                self._pass(context, message.pass_id).put(message.message, message.gradients)

    def send_gradients(self, run: Pass, message: MessageId, gradients: Sequence[Tensor | None]) -> None:
        uid = message[1]
        if uid == self.me.uid:
            run.put(message, gradients)
        else:
            to = self._member(uid, run.context)
            data, buffers = orders.write(to, run.context_id, run.id, message, gradients)
            self.agent.send_order(to, data, buffers)

    def end(self, run: Pass, asked: Any, error: BaseException | None, going: OutgoingGradients) -> None:
        """End this worker's part: send the remaining gradients, and answer the worker that began the pass."""
        connection, number = asked
        data: bytes = b""
        buffers: Sequence[Any] = ()
        try:
            for message, gradients in going:
                if message[1] == run.id[0] and not data:
                    data, buffers = orders.write(connection.peer, run.context_id, run.id, message, gradients)
                else:
                    self.send_gradients(run, message, gradients)
        except BaseException as failed:
            error = error or failed
        self.agent.answer_order(connection, number, data, buffers, error)

    def _abort(self, sender: WorkerAddress, message: tuple[int, PassId, str]) -> None:
        context = self.contexts.get(message[0])
        if context is not None:  # the abort may arrive before BEGIN, which may travel on another socket
            run = self._pass(context, message[1])
            run.fail(PhalanxError(f"backward of context {message[0]} was aborted by {sender}: {message[2]}"))

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _lose(self, member: WorkerAddress) -> None:
        """Release the contexts that a lost worker opened, and fail the passes that it began."""
        for context in self.contexts.all():
            for run in list(context.passes.values()):
                if run.id[0] == member.uid:
                    text = f"backward of context {context.id}: {member}, which began it, is lost."
                    run.fail(PeerLostError(text, ranks=(member.info.id,)))
            if context.origin == member.uid:
                self.release(context.id)

    def _close(self) -> None:
        set_call_hook(None)
        for context in self.contexts.all():
            for run in list(context.passes.values()):
                run.fail(ClosedError(f"backward of context {context.id}: {self.agent.me} was shut down."))
            self.contexts.release(context.id)
        _workers.pop(self.agent.me.uid, None)


def _read_end(run: Pass, frame: Frame) -> None:
    """Read another worker's final answer, which may carry its last gradients."""
    if frame.data:
        message = orders.read(frame)
        if message.gradients is not None:
            run.put(message.message, message.gradients)


_workers: dict[int, AutogradWorker] = {}


def serve_autograd(agent: Agent) -> None:
    """Create the agent's autograd worker, which registers itself with the agent."""
    _workers[agent.me.uid] = AutogradWorker(agent)


def worker() -> AutogradWorker:
    """Return this process's autograd worker.

    Raises:
        ClosedError: this process is not a worker.
    """
    return _workers[current.agent().me.uid]


class AutogradHook:
    """An `AutogradHook` adds a note to calls: (context, uid of its origin, message or None, tensors' ancestors).

    Under `no_grad` the ancestors are None, and the answer's tensors have no graph.
    """

    def __init__(self, contexts: Contexts, me: WorkerAddress) -> None:
        self._contexts = contexts
        self._uid = me.uid
        self._numbers = itertools.count()

    def on_request(self, to: WorkerAddress, payload: Payload) -> Any:
        """Return the note for a call, and add the callee to this thread's context."""
        context = self._contexts.current
        if context is None:
            return None
        if to.uid not in context.known and to.uid != self._uid:
            context.known[to.uid] = to
        if context.has_ended:  # check after adding the callee: the release is sent to all workers in `known`
            return None
        if not torch.is_grad_enabled():
            return context.id, context.origin, None, None
        return self._note(context, to, payload)

    def receive_request(
        self, note: Any, arrived: ReceivedTensors, caller: WorkerAddress
    ) -> AbstractContextManager[Any]:
        """Return the scope of the caller's context, in which the function runs."""
        context = self._contexts.find_or_open(note[0], note[1])
        _attach(context, note, arrived)
        return self._contexts.enter(context)

    def on_reply(self, to: WorkerAddress, payload: Payload, note: Any) -> Any:
        """Return the note for a result; the grad mode of the sending thread has no effect."""
        context = None if note[3] is None else self._contexts.find_or_open(note[0], note[1])
        if context is None:
            return None
        with torch.inference_mode(False), torch.enable_grad():
            return self._note(context, to, payload)

    def receive_reply(self, note: Any, arrived: ReceivedTensors, callee: WorkerAddress) -> None:
        _attach(self._contexts.get(note[0]), note, arrived)

    def _note(self, context: Context, to: WorkerAddress, payload: Payload) -> Any:
        leaving = [one for one in (*payload.tensors, *payload.sparse) if one.requires_grad]
        made = make_send(leaving, context.id, to.uid, self._uid, next(self._numbers)) if leaving else None
        if made is None:
            return context.id, context.origin, None, ()
        send, ancestors = made
        context.sends[send.message] = send
        return context.id, context.origin, send.message, ancestors


def _attach(context: Context | None, note: Any, arrived: ReceivedTensors) -> None:
    context_id, _, message, ancestors = note
    tensors = arrived.that_require_grad()
    if message is not None and context is not None:
        context.received[message] = make_recv(tensors, context_id, message, ancestors)
    else:  # sent without a graph: the tensors are leaves, as outside a context
        for one in tensors:
            one.requires_grad_()
