"""An `IncomingCall` is a call from another worker, from its received frame to the answer."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch.futures import Future

from phalanx._base.torch_names import find
from phalanx.errors import message_of
from phalanx.rpc import remote_error, serialization, wire
from phalanx.rpc.agent.pool import CallLimit
from phalanx.rpc.call_hook import call_hook
from phalanx.rpc.references import OwnedObject, References
from phalanx.rpc.remote_error import MissingFunctionError, set_error
from phalanx.rpc.serialization import deserialize_call
from phalanx.rpc.wire import Frame
from phalanx.rpc.worker_info import WorkerAddress

_Future: Any = find("torch._C.Future", loses="phalanx.rpc does not work")


class Worker(Protocol):
    """A `Worker` runs incoming calls."""

    me: WorkerAddress
    references: References

    def receive_forks(self, forks: Any) -> list[Any]:
        """Return the references received with a call."""

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
        """Send the answer."""


class IncomingCall:
    """An `IncomingCall` is created by the reading thread, in order of arrival; a REMOTE call registers its object."""

    __slots__ = (
        "_agent",
        "_caller",
        "_connection",
        "_error",
        "_forks",
        "_frame",
        "_note",
        "_owned",
        "_unconfirmed",
        "_work",
    )

    def __init__(self, agent: Worker, connection: Any, frame: Frame) -> None:
        self._agent = agent
        self._connection = connection
        self._caller = connection.peer or agent.me
        self._frame = frame
        self._note: Any = None
        self._forks: Any = None
        self._owned: OwnedObject | None = None
        self._error: BaseException | None = None
        self._work: Any = None
        self._unconfirmed: list[Future[Any]] = []
        if frame.extras:
            self._forks, rref, self._note = pickle.loads(frame.extras)
            if frame.kind == wire.REMOTE:
                rref_id, fork = rref
                self._owned = agent.references.make(rref_id, fork, self._caller.uid)

    def run(self, limit: CallLimit, more_follow: Callable[[], int]) -> None:
        """Run the function once the limit admits it, and answer; queue the answer if `more_follow()` is not 0."""
        self._prepare()
        try:
            if limit.enter():
                self._run(more_follow)
        finally:
            limit.leave()

    def _prepare(self) -> None:
        frame = self._frame
        try:
            forks = self._agent.receive_forks(self._forks) if self._forks else []
            self._unconfirmed = [rref._get_future() for rref in forks if not rref.is_owner()]
            self._work, arrived = deserialize_call(
                frame.data, frame.buffers, forks, without_grad=self._note is not None
            )
            frame.buffers = ()
            if self._note is not None:
                self._work = (*self._work, arrived)
        except BaseException as error:
            if isinstance(error, AttributeError) and _is_of_pickle(error):
                error = _explain_missing(error)
            self._error = error

    def _run(self, more_follow: Callable[[], int]) -> None:
        try:
            if self._error is not None:
                raise self._error
            result = self._call()
        except BaseException as error:
            self._work = None
            self._finish(error=error, later=bool(more_follow()))
            return
        self._work = None
        if isinstance(result, _AsyncResult):
            future: Future[Any] = result.future
            del result
            future.add_done_callback(self._finish_async)
        else:
            self._finish(result, later=bool(more_follow()))

    def _call(self) -> Any:
        for one in self._unconfirmed:  # the function may need its references confirmed by their owners
            with contextlib.suppress(Exception):  # the first use of the reference raises the error
                one.wait()
        function, args, kwargs = self._work[:3]
        hook = call_hook()
        if self._note is not None and hook is not None:
            with hook.receive_request(self._note, self._work[3], self._caller):
                result = function(*args, **kwargs)
        else:
            result = function(*args, **kwargs)
        if _is_async(function, args):
            if not isinstance(result, _Future):  # not torch.futures.Future: `then` returns this base class
                raise RuntimeError(
                    "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but "
                    f"{getattr(function, '__qualname__', function)} returned {type(result).__name__}."
                )
            return _AsyncResult(cast("Future[Any]", result))
        return result

    def _finish_async(self, done: Future[Any]) -> None:
        try:
            result = done.value()
        except BaseException as error:
            self._finish(error=error)
        else:
            self._finish(result)

    def _finish(self, result: Any = None, *, error: BaseException | None = None, later: bool = False) -> None:
        agent, owned = self._agent, self._owned
        if owned is None:
            agent.answer(self._connection, self._frame.call, result, error=error, note=self._note, later=later)
        else:  # the answer confirms that the call is done; RRef.to_here fetches the object
            message = None
            if isinstance(result, ProfiledResult):  # the result stays here, and the answer carries the events
                message, result = ProfiledResult(None, result.duration_us, result.events), result.result
            agent.answer(self._connection, self._frame.call, message, later=later)
            self._resolve(owned.future, result, error)

    def _resolve(self, future: Future[Any], result: Any, error: BaseException | None) -> None:
        """Set the object of a reference, or the error of the call that should have made it."""
        if error is None:
            future.set_result(result)
        else:
            data = remote_error.pack(error, str(self._agent.me.info))
            set_error(future, lambda: remote_error.unpack(data))


@dataclass(frozen=True)
class RemoteEvent:
    """A `RemoteEvent` is a profiled event, timed from the start of its profile; `fields` are for `FunctionEvent`."""

    node_id: int
    start_us: float
    end_us: float
    is_async: bool
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class ProfiledResult:
    """A `ProfiledResult` is the result of a call that took `duration_us`, with the events of the call."""

    result: Any
    duration_us: float
    events: Sequence[RemoteEvent]


class _AsyncResult:
    """An `_AsyncResult` is the future that a function marked with @async_execution has returned."""

    __slots__ = ("future",)

    def __init__(self, future: Future[Any]) -> None:
        self.future = future


def _is_async(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether @async_execution marks the function itself, or the function or method that it calls."""
    if getattr(function, "_calls_function", False):
        function, args = args[1], args[2]
    if getattr(function, "_calls_method", False):
        function = getattr(args[0].local_value(), args[1])
    return hasattr(function, "_wrapped_async_rpc_function")


def _is_of_pickle(error: AttributeError) -> bool:
    """Return whether the error was raised by pickle's lookup of a name, and not by code that rebuilds an object."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = None if trace is None else trace.tb_frame.f_code
    return code is not None and (code.co_filename == serialization.__file__ or code.co_name == "__getattr__")


def _explain_missing(error: AttributeError) -> MissingFunctionError:
    made = MissingFunctionError(
        f"{message_of(error)}. Default RPC pickler does not serialize function code. Ensure that UDFs are defined on "
        "both caller and callee modules."
    )
    made.__cause__ = error
    return made
