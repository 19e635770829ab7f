"""`Answering` answers what others ask: of the worker itself, and with the results of their requests."""

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


class Answering:
    """It answers on behalf of `agent`. `controls` are what workers ask of each other, by name.

    Each control gets the asker, and one argument. It runs in the reader: it must not wait. Its result is the answer; a
    Future is answered when it is done. `orders` are those that come in bytes, by their first one: given the connection
    and the frame, they answer themselves. One that wants no answer runs in the reader, too.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.controls: dict[str, Control] = {}
        self.orders: dict[int, Callable[[Any, Frame], None]] = {}
        self._dirty: deque[Any] = deque()  # connections with frames that were put aside

    def take_control(self, connection: Any, frame: Frame) -> None:
        """Carry out a control, and answer if an answer is wanted."""
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

    def take_order(self, connection: Any, frame: Frame) -> None:
        """Carry out an order, which answers itself; one that raises is answered with the error."""
        try:
            self.orders[frame.data[0]](connection, frame)
        except BaseException as error:
            if frame.call:
                self.answer(connection, frame.call, error=error)
            else:
                _logger.error(
                    "rpc: what %s says cannot be carried out: %s", connection.peer or self._agent.me, message_of(error)
                )

    def take_fetch(self, connection: Any, frame: Frame) -> None:
        """Answer with the object of a reference, once it is there."""
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
        """Answer a call. Never raises: what cannot be pickled is an error at the caller."""
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
            except BaseException as problem:  # else who asked would wait for ever
                self.answer(connection, number, error=problem)

    def send_later(self, connection: Any) -> None:
        """Have the reader send what was put into the queue of a connection."""
        self._agent.reader.put(connection.flush)

    @property
    def has_more(self) -> bool:
        """Return whether something was put aside."""
        return bool(self._dirty)

    def flush(self) -> None:
        """Send what was put aside."""
        dirty = self._dirty
        while dirty:
            try:
                connection = dirty.popleft()
            except IndexError:
                return
            connection.flush()
