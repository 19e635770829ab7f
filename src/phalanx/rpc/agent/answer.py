"""An `Answer` is what a call returns, a future that the reader sets; of a call over a line, it is a `LineAnswer`."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from torch.futures import Future

from phalanx._base.torch_names import find
from phalanx.rpc.agent import interrupts
from phalanx.rpc.agent.reader import this_thread
from phalanx.rpc.agent.ready import wait_ready
from phalanx.rpc.line import Line
from phalanx.rpc.remote_error import set_error
from phalanx.rpc.wire import Frame

_Future: Any = find("torch._C.Future", loses="phalanx.rpc does not work")

T = TypeVar("T")


class Answer(Future[T]):
    """`Answer` is the future of a call."""

    def wait(self) -> T:
        return wait_interruptibly(self)  # type: ignore[no-any-return]

    def fail(self, make: Callable[[], BaseException]) -> None:
        """Set the error that `make` returns."""
        set_error(self, make)

    def on_done(self, callback: Callable[[Any], Any]) -> None:
        """Add a callback of ours, which may run in the reader: it must not wait."""
        _Future.add_done_callback(self, callback)

    def then(self, callback: Any) -> Any:
        """Call torch's `then`; the callback does not run in the reader."""
        _check(callback)
        passed_on: Future[Any] = Future()
        self.add_done_callback(passed_on.set_result)
        return passed_on.then(lambda done: callback(done.value()))

    def add_done_callback(self, callback: Any) -> None:
        """Call torch's `add_done_callback`; the callback does not run in the reader."""
        _check(callback)
        _Future.add_done_callback(self, partial(_run_or_leave, callback))


def _check(callback: Any) -> None:
    if not callable(callback):
        raise TypeError(f"incompatible function arguments: a callback is callable, got {type(callback).__name__}")


def _run_or_leave(callback: Callable[[Any], Any], done: Any) -> None:
    """Run a callback of the user's; in the reader, leave it to another thread, behind those before it."""
    callbacks = this_thread.callbacks
    if callbacks is None:
        callback(done)
    else:
        callbacks.append(partial(callback, done))


def wait_interruptibly(future: Any) -> Any:
    """Wait for the future and return its value; in the main thread, unlike torch's `Future.wait`, handle signals."""
    if not _Future.done(future):
        if this_thread.read_more is not None:  # a finalizer that ran in the reader
            while not _Future.done(future):
                this_thread.read_more()
        elif threading.current_thread() is threading.main_thread():
            gate = threading.Lock()
            gate.acquire()
            _Future.add_done_callback(future, lambda _: gate.release())
            interrupts.wait(gate.acquire)
    return _Future.wait(future)


_LOOK_MS = 1000  # a signal may come just before a thread sleeps
_failing = threading.RLock()  # while it is held, the line of a call that fails is not closed


class Caller(Protocol):
    """`Caller` is the worker whose call an answer is for."""

    def receive(self, connection: Any, frame: Frame, call: Any) -> tuple[Any, Callable[[], BaseException] | None]:
        """Return the result that is in the answer's frame, or what makes the error in it."""

    def leave(self, line: Line, call: Any) -> None:
        """Have the reader read the line, because nobody waits for the answer any more."""


class LineAnswer:
    """`LineAnswer` is the answer of a call over a line. The thread that waits for it reads the line itself.

    Another thread may call `fail`, which has taken the call before: then that is the end, unless the answer is there.
    """

    __slots__ = ("_call", "_callback", "_caller", "_line", "_make", "_result")

    def __init__(self, line: Line, caller: Caller, call: Any) -> None:
        self._line: Line | None = line
        self._caller = caller
        self._call = call
        self._result: Any = None
        self._make: Callable[[], BaseException] | None = None  # it makes the error
        self._callback: Callable[[Any], Any] | None = None

    def wait(self) -> Any:
        """Return the result, or raise the error, when it is there."""
        interrupts.defer()
        try:
            self.read_until(_never)
        except BaseException:
            self._leave()
            raise
        finally:
            interrupts.allow()
        return self.value()

    def value(self) -> Any:
        """Return the result, or raise the error, which is there."""
        if self._make is not None:
            raise self._make()
        return self._result

    def on_done(self, callback: Callable[[Any], Any]) -> None:
        """Set the callback of ours, which may run in the reader: it must not wait. The call has just been made."""
        self._callback = callback
        if self._make is not None and self._callback is not None:
            self._call_back()

    def _call_back(self) -> None:
        with _failing:
            callback, self._callback = self._callback, None
        if callback is not None:
            callback(self)

    def fail(self, make: Callable[[], BaseException]) -> None:
        """Set the error that `make` returns, unless the waiting thread finds the answer."""
        with _failing:
            self._make = make
            if self._line is not None:
                self._line.has_failed = True
            self.ring()
        self._call_back()

    def ring(self) -> None:
        """Have the thread that reads the line ask again whether what it waits for has come."""
        with _failing:
            line = self._line
            if line is not None:
                line.bell.ring()

    def read_until(self, has_come: Callable[[], bool]) -> None:
        """Read the line until the answer or an error is there, or `has_come`, which is asked again at each `ring`."""
        while (line := self._line) is not None and not has_come():
            ready = line.wait(line.bell.fileno(), _LOOK_MS)
            interrupts.check()
            self._read(line, ready)

    def _read(self, line: Line, ready: int) -> None:
        """Read what has come over the line (1); if nothing has, see whether the call has failed. 2: the bell rang."""
        if ready & 2:
            line.bell.drain()
        if ready & 1:
            frames = line.read()
            if frames is None:
                self._end(line)
            elif frames:
                self._finish(line, frames[0])
        elif self._make is not None:
            self._give_up(line)

    @property
    def can_come(self) -> bool:
        """Return whether there is more to read."""
        return self._line is not None

    def _finish(self, line: Line, frame: Frame) -> None:
        call = self._call
        is_ours = call.take() or self._await_failure(line)
        self._line = self._call = None
        line.lines.put_back(line)
        self._result, self._make = self._caller.receive(line, frame, call)
        if is_ours and self._callback is not None:
            self._call_back()

    def _await_failure(self, line: Line) -> bool:
        """Wait until the thread that has taken the call has made it fail; return False."""
        while self._make is None:
            line.bell.drain()
            if self._make is None:
                wait_ready(line.bell.fileno(), -1, 0, _LOOK_MS)
        with _failing:
            return False

    def _end(self, line: Line) -> None:
        """Fail with the loss of the callee, which the reader notices as well, or because not all could be sent."""
        if self._make is None:
            line.connection.break_off()
        self._await_failure(line)
        with _failing:
            self._line = self._call = None
        line.close()

    def _give_up(self, line: Line) -> None:
        """Fail: the call has taken too long, or this worker ends."""
        self._await_failure(line)
        self._leave()

    def _leave(self) -> None:
        with _failing:
            line, call, self._line, self._call = self._line, self._call, None, None
        if line is not None and call is not None:
            self._caller.leave(line, call)

    def close(self) -> None:
        """Close the line, over which only a part of the call may have gone."""
        line, self._line, self._call = self._line, None, None
        if line is not None:
            line.close()

    def __del__(self) -> None:
        self._leave()


def _never() -> bool:
    return False


def read_any(answers: Sequence[LineAnswer]) -> None:
    """Wait until something comes over one of these lines, or `ring` is called of one; read what has come."""
    poll = select.poll()
    lines = [(one, line) for one in answers if (line := one._line) is not None]
    for _, line in lines:
        for fd in (line.fd, line.bell.fileno()):
            poll.register(fd, select.POLLIN)
    ready = dict(poll.poll(_LOOK_MS))
    interrupts.check()
    for one, line in lines:
        one._read(line, (line.fd in ready) + 2 * (line.bell.fileno() in ready))
