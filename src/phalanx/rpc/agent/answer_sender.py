"""An `AnswerSender` runs the controls and orders that other workers send, and sends all answers to other workers."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.futures import Future

from phalanx._base.log import get_logger
from phalanx._base.torch_names import find
from phalanx.errors import PhalanxError, message_of
from phalanx.rpc import remote_error, wire
from phalanx.rpc.call_hook import call_hook
from phalanx.rpc.serialization import deserialize, serialize
from phalanx.rpc.wire import Frame
from phalanx.rpc.worker_info import WorkerAddress

if TYPE_CHECKING:
    from phalanx.rpc.agent.agent import Agent

_Future: Any = find("torch._C.Future", loses="phalanx.rpc does not work")

_logger = get_logger(__name__)

Control = Callable[[WorkerAddress, Any], Any]


class AnswerSender:
    """An `AnswerSender` answers other workers for `agent`.

    `controls` are functions that agents call by name. Each gets the caller and one argument, runs in the reader, and
    must not wait. Its result is the answer; if it is a Future, the answer is sent when the Future completes.

    `orders` are the handlers of binary messages, by first byte. Each gets the connection and the frame, and sends the
    answer itself. If no answer is expected, the handler runs in the reader, and must not wait.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.controls: dict[str, Control] = {}
        self.orders: dict[int, Callable[[Any, Frame], None]] = {}
        self._dirty: deque[Any] = deque()  # connections with queued frames

    def handle_control(self, connection: Any, frame: Frame) -> None:
        """Run a control, and send its answer if the caller waits for one."""
        member = connection.peer or self._agent.me
        try:
            (name, argument), _ = deserialize(frame.data, frame.buffers)
            result = self.controls[name](member, argument)
        except BaseException as error:
            self.answer(connection, frame.call, error=error)
            return
        if not frame.call:
            return
        if isinstance(result, _Future):
            result.add_done_callback(lambda done: self._answer_future(connection, frame.call, done))
        else:
            self.answer(connection, frame.call, result)

    def handle_order(self, connection: Any, frame: Frame) -> None:
        """Call the handler of an order, which sends the answer; if it raises, answer with the error."""
        try:
            self.orders[frame.data[0]](connection, frame)
        except BaseException as error:
            if frame.call:
                self.answer(connection, frame.call, error=error)
            else:
                _logger.error(
                    "rpc: a message of %s cannot be handled: %s", connection.peer or self._agent.me, message_of(error)
                )

    def handle_fetch(self, connection: Any, frame: Frame) -> None:
        """Answer with the object of a reference, once the object is made."""
        rref_id = pickle.loads(frame.data)
        note = pickle.loads(frame.extras)[2] if frame.extras else None
        owned = self._agent.references.find_or_expect(rref_id)
        if owned is None:
            error = PhalanxError(f"RRef: {self._agent.me} owns no object {rref_id} (any more).")
            self.answer(connection, frame.call, error=error)
        else:
            owned.future.add_done_callback(lambda done: self._answer_future(connection, frame.call, done, note))

    def _answer_future(self, connection: Any, number: int, done: Future[Any], note: Any = None) -> None:
        try:
            result = done.value()
        except BaseException as error:
            self.answer(connection, number, error=error)
        else:
            self.answer(connection, number, result, note=note)

    def answer(
        self,
        connection: Any,
        number: int,
        result: Any = None,
        *,
        error: BaseException | None = None,
        note: Any = None,
        later: bool = False,
    ) -> None:
        """Answer a call. Never raises: if the result cannot be pickled, the caller receives that error."""
        to = connection.peer or self._agent.me
        if error is None:
            payload = None
            try:
                payload = serialize(result, to, is_answer=True)
                hook = call_hook()
                if note is not None and hook is not None:
                    note = hook.on_reply(to, payload, note)
                else:
                    note = None
                extras = b""
                if payload.forks or note is not None:
                    extras = pickle.dumps((payload.forks or None, None, note), 5)
                connection.put(wire.REPLY, number, payload.data, extras, payload.buffers)
            except BaseException as problem:
                error = problem
                if payload is not None:
                    payload.revoke()
        if error is not None:
            connection.put(wire.ERROR, number, remote_error.pack(error, str(self._agent.me.info)))
        if later:
            self._dirty.append(connection)
        else:
            connection.flush()

    def answer_order(
        self, connection: Any, number: int, data: bytes, buffers: Sequence[Any], error: BaseException | None
    ) -> None:
        if error is not None:
            self.answer(connection, number, error=error)
        else:
            try:
                connection.send(wire.REPLY, number, data, b"", buffers)
            except BaseException as problem:  # otherwise the caller would wait forever
                self.answer(connection, number, error=problem)

    def send_later(self, connection: Any) -> None:
        """Queue a task for the reader: send the queued frames of a connection."""
        self._agent.reader.put(connection.flush)

    @property
    def has_more(self) -> bool:
        """Return whether answers are queued."""
        return bool(self._dirty)

    def flush(self) -> None:
        """Send the queued answers."""
        dirty = self._dirty
        while dirty:
            try:
                connection = dirty.popleft()
            except IndexError:
                return
            connection.flush()
