"""An `AnswerReader` completes this worker's calls with received answers, in the reader or in the waiting thread."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from phalanx._base.log import get_logger
from phalanx._base.torch_names import find
from phalanx.errors import message_of
from phalanx.rpc import remote_error, wire
from phalanx.rpc.agent.calls import Call
from phalanx.rpc.call_hook import call_hook
from phalanx.rpc.serialization import UserCodeError, deserialize
from phalanx.rpc.wire import Frame
from phalanx.rpc.worker_info import WorkerAddress

if TYPE_CHECKING:
    from phalanx.rpc.agent.agent import Agent


_logger = get_logger(__name__)


class AnswerReader:
    """An `AnswerReader` unpickles answers, and sets the futures of calls."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def complete(self, connection: Any, frame: Frame, call: Call | None, *, may_wait: bool = False) -> None:
        """Set the future of a call.

        If unpickling may run the user's code, queue the answer for another thread, which `may_wait`.
        """
        if call is None:  # the answer is late; this worker owns the references in the answer, and releases them
            if frame.extras:
                self._drop_forks(frame)
            return
        try:
            result, make = self.receive(connection, frame, call, no_user_code=not may_wait)
        except UserCodeError:
            self._agent.threads.put(partial(self.complete, connection, frame, call, may_wait=True))
            return
        if make is not None:
            call.fail(make)
        else:
            assert call.future is not None
            call.future.set_result(result)

    def receive(
        self, connection: Any, frame: Frame, call: Call, *, no_user_code: bool = False
    ) -> tuple[Any, Callable[[], BaseException] | None]:
        """Return the result in an answer, or the function that makes its error.

        Raises:
            UserCodeError: unpickling would run the user's code, and `no_user_code` is set; nothing was done.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.receive(connection, frame, call, no_user_code=no_user_code)
        data: Any = frame.data
        if frame.kind == wire.ERROR:
            return None, partial(remote_error.unpack, data)
        try:
            if call.read is None:
                result = self._read_reply(frame, connection.peer or self._agent.me, no_user_code)
            else:
                result = call.read(frame)
            if call.on_answer is not None:
                result = call.on_answer(result)
        except UserCodeError:
            raise
        except BaseException as error:
            return None, partial(remote_error.unpack, remote_error.pack(error, str(self._agent.me.info)))
        return result, None

    def _read_reply(self, frame: Frame, callee: WorkerAddress, no_user_code: bool) -> Any:
        if not frame.extras:
            return deserialize(frame.data, frame.buffers, no_user_code=no_user_code)[0]
        forks, _, note = pickle.loads(frame.extras)
        if forks and no_user_code:  # the references can be received only once
            raise UserCodeError
        result, arrived = deserialize(
            frame.data,
            frame.buffers,
            self.receive_forks(forks),
            without_grad=note is not None,
            no_user_code=no_user_code,
        )
        hook = call_hook()
        if note is not None and hook is not None:
            hook.receive_reply(note, arrived, callee)
        return result

    def receive_forks(self, forks: Any) -> list[Any]:
        """Return the references received with a call, as RRefs. If one cannot be made, the others are released."""
        made: list[Any] = []
        problem: BaseException | None = None
        for fork in forks or ():
            try:
                made.append(self._agent.make_rref(*fork))
            except BaseException as error:
                problem = problem or error
        if problem is not None:
            made.clear()  # the error keeps this frame alive, and the frame would keep the references alive
            raise problem
        return made

    def _drop_forks(self, frame: Frame) -> None:
        """Release the references in an answer. Never raises: the thread of another call may have read the frame."""
        forks: Any = None
        try:
            forks = pickle.loads(frame.extras)[0]
        except BaseException as error:
            _logger.error("rpc: the references in a late answer cannot be read: %s", message_of(error))
        for fork in forks or ():
            try:
                self._agent.make_rref(*fork)
            except Exception as error:  # for example, its owner cannot be notified: still release the others
                _logger.error("rpc: a reference in a late answer cannot be released: %s", message_of(error))


_LOSES = "an answer of phalanx.rpc that a thread inside a mode of torch reads is changed by the mode"
_num_dispatch_modes: Any = find("torch._C._len_torch_dispatch_stack", loses=_LOSES, instead=int)
_num_function_modes: Any = find("torch._C._len_torch_function_stack", loses=_LOSES, instead=int)
_find_transform: Any = find("torch._C._functorch.maybe_current_level", loses=_LOSES, instead=lambda: None)


def is_in_mode() -> bool:
    """Return whether this thread is in a mode of torch (such as a default device) or in a transform of torch.func."""
    return bool(_num_function_modes() or _num_dispatch_modes() or _find_transform() is not None)
