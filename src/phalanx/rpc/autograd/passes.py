"""A `Pass` is one worker's part of a backward pass.

    worker 0 (calls backward)            worker 1                        worker 2
    finds all messages that take part
    runs the engine from the roots
    RecvRpc ── BEGIN, gradients ───────► engine from SendRpc
    gate: waits ── BEGIN ──────────────────────────────────────────────► ·
                                         RecvRpc ── gradients ─────────► engine from SendRpc
                                         its part is over                leaves: gradients gather
    SendRpc ◄──────────────────────────── gradients ───────────────────── RecvRpc
    continues; ends when the engine has, and all other workers have answered

BEGIN lists a worker's messages in the pass. It is sent with the first gradients. But before worker 0 waits for the
gradients of a message, it sends BEGIN to all workers that may compute them: the senders of deeper messages. A short
part that starts from one message sends its gradients when it ends; its answer to worker 0 carries those for worker 0.

Each worker runs the engine once: every node of its graph gets all its gradients before it runs, and runs once. Gates
with the lowest priority wait for a worker's messages inside the engine, deepest first. All workers wait in the same
order, so some worker is always computing the next gradients in that order: no two workers wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.errors import PhalanxError, message_of
from phalanx.rpc.agent.answer import Answer, LineAnswer, read_any
from phalanx.rpc.autograd.contexts import Context, Contexts
from phalanx.rpc.autograd.graph import (
    GraphEnds,
    MessageId,
    SentMessage,
    chain_gates,
    current,
    run_engine,
    run_engine_from,
)
from phalanx.rpc.autograd.orders import PassId, Plan
from phalanx.rpc.worker_info import WorkerAddress


class BackwardError(PhalanxError):
    """A worker's part of a backward pass failed; `__cause__` shows where."""


def nothing(message: MessageId) -> None:
    """Do nothing: no other worker's part must begin."""


OutgoingGradients = list[tuple[MessageId, Sequence[Tensor | None]]]  # the gradients of other workers' messages


class PassWorker(Protocol):
    """A `PassWorker` is the worker of a pass."""

    me: WorkerAddress
    contexts: Contexts

    def send_gradients(self, run: Pass, message: MessageId, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients to the sender of the message."""

    def end(self, run: Pass, asked: Any, error: BaseException | None, outgoing: OutgoingGradients) -> None:
        """End this worker's part: send the remaining gradients, and answer the worker that began it."""

    def timed(self, part: Callable[[bool], None]) -> None:
        """Call `part(is_short)`, this worker's part of a pass; `is_short` predicts its duration from recent parts."""


class Pass:
    """A `Pass` is the part of one worker. A thread that runs the engine does not own the pass's lock meanwhile."""

    __slots__ = (
        "_arrived", "_asked", "_caller", "_changed", "_plan", "_retain_graph", "_worker",
        "begin_others", "begun", "context", "context_id", "error", "id", "num_others", "send_gradients",
    )  # fmt: skip

    def __init__(self, context: Context, pass_id: PassId, worker: PassWorker) -> None:
        self.context = context
        self.context_id = context.id
        self.id = pass_id
        self._worker = worker
        self.error: BaseException | None = None
        self.num_others = 0  # on the caller of backward: how many parts of other workers have not ended
        # a function that begins the parts that a message's gradients may need
        self.begin_others: Callable[[MessageId], None] = nothing
        # the parts that the caller of backward has begun, by worker
        self.begun: dict[int, Answer[Any] | LineAnswer] = {}
        self._caller = 0  # the id of the thread that called backward, which reads the lines of `begun`
        self.send_gradients = worker.send_gradients
        self._changed = threading.Condition(threading.Lock())
        self._arrived: dict[MessageId, list[Tensor | None]] = {}
        self._plan: Plan | None = None
        self._retain_graph = False
        self._asked: list[Any] = []  # where to answer at the end of this part

    # -- messages of others --------------------------------------------------------------------------------------------

    def begin(
        self,
        asked: Any,
        plan: Plan,
        retain_graph: bool,
        message: MessageId,
        gradients: Sequence[Tensor | None] | None,
    ) -> None:
        """Run this worker's part of the pass, and answer `asked` at its end.

        `plan` lists this worker's messages; `gradients` are those of `message`.

        The engine starts once the gradients of the plan's first message have arrived: before, it has nothing to do.
        """
        with self._changed:
            self._asked.append(asked)
            if len(self._asked) > 1:  # BEGIN was sent twice: Ctrl-C interrupted the caller while it sent the first
                return
            if gradients is not None:
                self._arrived[message] = list(gradients)
            self._plan, self._retain_graph = plan, retain_graph
            while self.error is None and plan[0][0] not in self._arrived:
                self._changed.wait()
            failed = self.error is not None
        if failed:
            self._finish()
        else:
            self._worker.timed(self._run_part)

    def put(self, message: MessageId, gradients: Sequence[Tensor | None]) -> None:
        """Accept the gradients of a message that this worker has sent."""
        with self._changed:
            self._arrived[message] = list(gradients)
            self._notify()

    def fail(self, error: BaseException) -> None:
        """Fail the part with an error, unless it has failed before."""
        with self._changed:
            if self.error is None:
                self.error = error
            self._notify()

    def on_other_done(self, done: Any) -> None:
        """Record the end of another worker's part."""
        failed: BaseException | None = None
        try:
            done.value()
        except BaseException as error:
            failed = error
        with self._changed:
            self.num_others -= 1
            if self.error is None:
                self.error = failed
            self._notify()

    def _notify(self) -> None:
        """Wake the threads that wait for a change, in the engine or for a line. The caller owns the lock."""
        self._changed.notify_all()
        if self._caller and self._caller != get_ident():
            for one in self.lines():
                one.ring()

    def lines(self) -> list[LineAnswer]:
        """Return the pending answers over lines."""
        return [one for one in list(self.begun.values()) if isinstance(one, LineAnswer) and one.is_pending]

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        """Wait until `is_true()`; the caller of backward reads the lines over which it has begun other parts."""
        while self._caller == get_ident() and not is_true() and (lines := self.lines()):
            if len(lines) == 1:
                lines[0].read_until(is_true)
            else:
                read_any(lines)
        with self._changed:
            self._changed.wait_for(is_true)

    # -- called by the nodes of the graph, in the engine ---------------------------------------------------------------

    def wait(self, message: MessageId) -> None:
        if message not in self._arrived and self.id[0] == self._worker.me.uid:
            self.begin_others(message)
        self._wait_until(lambda: self.error is not None or message in self._arrived)
        if self.error is not None and message not in self._arrived:
            raise self.error

    def pop_gradient(self, message: MessageId, number: int) -> Tensor | None:
        """Remove and return one tensor's gradient. A gate, or `begin` for the first message, has waited for it."""
        with self._changed:
            arrived = self._arrived[message]
            gradient, arrived[number] = arrived[number], None
            return gradient

    def send(self, message: MessageId, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of a message of another worker."""
        if self.error is not None:
            raise self.error
        self.send_gradients(self, message, gradients)

    def gather(self, variable: Tensor, gradient: Tensor) -> None:
        """Add a leaf's gradient to the context; the running engine may use it elsewhere."""
        self.context.accumulate([(variable, gradient)], is_shared=True)

    def inside(self) -> AbstractContextManager[Any]:
        return self._worker.contexts.enter(self.context)

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, roots: Sequence[Tensor], reached: GraphEnds, plan: Plan, retain_graph: bool) -> None:
        """Run the part of the worker that called backward, in the calling thread; `reached` are its graph's ends."""
        self._caller = get_ident()
        outputs = list(roots)
        gradients = [torch.ones_like(root) for root in roots]
        all_reached = [reached]
        if plan:
            sends = self._find(plan)
            outputs.append(chain_gates(sends))
            gradients.append(torch.empty(0, device="cpu"))
            all_reached += [send.reached for send in sends]
        self._run_engine(outputs, gradients, all_reached, retain_graph)

    def wait_others(self) -> None:
        """Wait until all other parts have ended, or this part has failed."""
        self._wait_until(lambda: self.error is not None or not self.num_others)

    def wait_all_others(self) -> None:
        """Wait until all other parts have ended."""
        self._wait_until(lambda: not self.num_others)

    def _run_part(self, is_short: bool) -> None:
        """Run this worker's part, when another worker has called backward."""
        outgoing: OutgoingGradients = []
        try:
            assert self._plan is not None
            sends = self._find(self._plan)
            if is_short and len(sends) == 1 and self._can_start_at(sends[0]):
                arrived = self._arrived.pop(sends[0].message)
                mine, outgoing = run_engine_from(self, sends[0], arrived, self._retain_graph)
                self.context.accumulate(mine)
            else:
                outputs = sends[0].stubs if len(sends) == 1 else [chain_gates(sends)]
                gradients = [torch.empty(0, device="cpu")] * len(outputs)
                self._run_engine(outputs, gradients, [send.reached for send in sends], self._retain_graph)
        except BaseException as error:
            with self._changed:
                self.error = self.error or error
        self._finish(outgoing)

    def _find(self, plan: Plan) -> list[SentMessage]:
        return [self.context.sends[message].part(mask) for message, mask in plan]

    def _can_start_at(self, send: SentMessage) -> bool:
        """Return whether `run_engine_from` can run: no gradient is None, and no hook requires `run_engine`."""
        arrived = self._arrived[send.message]
        nodes: list[Any] = [stub.grad_fn for stub in send.stubs]
        return all(arrived[node.number] is not None for node in nodes) and not send.reached.has_hooks()

    def _run_engine(self, outputs: Any, gradients: Any, reached: Any, retain_graph: bool) -> None:
        before, current.run = current.run, self
        try:
            found = run_engine(self, outputs, gradients, reached, retain_graph)
        finally:
            current.run = before
        self.context.accumulate(found)

    def _finish(self, outgoing: OutgoingGradients | None = None) -> None:
        self.context.passes.pop(self.id, None)
        self._arrived = {}
        with self._changed:
            asked, self._asked = self._asked, []
        error, self.error = self.error, None
        if error is not None:
            error = self.explain(error)
        for one in asked:
            self._worker.end(self, one, error, outgoing or [])
            outgoing = []

    def explain(self, error: BaseException) -> BaseException:
        """Return the error to raise where backward was called."""
        if isinstance(error, PhalanxError) or not isinstance(error, Exception):
            return error
        me = self._worker.me
        made = BackwardError(
            f"Error on Node {me.info.id}: {message_of(error)}\nbackward of context {self.context_id}: this "
            f"{type(error).__name__} was raised on {me}."
        )
        made.__cause__ = error
        return made
