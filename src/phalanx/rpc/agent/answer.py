"""An `Answer` is the future of a call, which the reader sets; a call over a line has a `LineAnswer`."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from torch.futures import Future

from phalanx._base.ipc.spin_wait import wait_ready
from phalanx._base.torch_names import find
from phalanx.rpc.agent import interrupts
from phalanx.rpc.agent.reader import this_thread
from phalanx.rpc.line import CallerLine
from phalanx.rpc.remote_error import set_error
from phalanx.rpc.wire import Frame

_Future: Any = find("torch._C.Future", loses="phalanx.rpc does not work")

T = TypeVar("T")


class Answer(Future[T]):
    """An `Answer` is the future of a call; callbacks of the user never run in the reader."""

    def wait(self) -> T:
        return wait_interruptibly(self)  # type: ignore[no-any-return]

    def fail(self, make: Callable[[], BaseException]) -> None:
        """Set the error that `make` returns."""
        set_error(self, make)

    def on_done(self, callback: Callable[[Any], Any]) -> None:
        """Add an internal callback, which may run in the reader and must not wait."""
        _Future.add_done_callback(self, callback)

    def then(self, callback: Any) -> Any:
        """Call torch's `then`; the callback does not run in the reader."""
        _check(callback)
        forwarded: Future[Any] = Future()
        self.add_done_callback(forwarded.set_result)
        return forwarded.then(lambda done: callback(done.value()))

    def add_done_callback(self, callback: Any) -> None:
        """Call torch's `add_done_callback`; the callback does not run in the reader."""
        _check(callback)
        _Future.add_done_callback(self, partial(_run_or_defer, callback))


def _check(callback: Any) -> None:
    if not callable(callback):
        raise TypeError(f"incompatible function arguments: a callback is callable, got {type(callback).__name__}")


def _run_or_defer(callback: Callable[[Any], Any], done: Any) -> None:
    """Run a callback of the user; in the reader, queue the callback for another thread, after the earlier callbacks."""
    callbacks = this_thread.callbacks
    if callbacks is None:
        callback(done)
    else:
        callbacks.append(partial(callback, done))


def wait_interruptibly(future: Any) -> Any:
    """Wait for the future and return its value; in the main thread, unlike torch's `Future.wait`, handle signals."""
    if not _Future.done(future):
        if this_thread.read_more is not None:  # this thread is the reader, and a finalizer waits in it
            while not _Future.done(future):
                this_thread.read_more()
        elif threading.current_thread() is threading.main_thread():
            gate = threading.Lock()
            gate.acquire()
            _Future.add_done_callback(future, lambda _: gate.release())
            interrupts.wait(gate.acquire)
    return _Future.wait(future)


_POLL_MS = 1000  # the longest sleep: a signal that arrives just before the sleep does not interrupt it
_failing = threading.RLock()  # while a thread owns it, the line of a failing call is not closed


class Caller(Protocol):
    """A `Caller` is the worker that waits for an answer."""

    def receive(self, connection: Any, frame: Frame, call: Any) -> tuple[Any, Callable[[], BaseException] | None]:
        """Return the result in an answer, or the function that makes its error."""

    def abandon_answer(self, line: CallerLine, call: Any) -> None:
        """Transfer to the reader an answer that no thread waits for any longer."""


class LineAnswer:
    """A `LineAnswer` is the answer of a call over a line. The thread that waits for it reads the line itself.

    The thread that claims the call (`Call.claim`) completes it. A thread other than the waiting one does so with
    `fail`: the waiting thread then raises that error, and the reader reads the late answer.
    """

    __slots__ = ("_call", "_callback", "_caller", "_line", "_make_error", "_result")

    def __init__(self, line: CallerLine, caller: Caller, call: Any) -> None:
        self._line: CallerLine | None = line
        self._caller = caller
        self._call = call
        self._result: Any = None
        self._make_error: Callable[[], BaseException] | None = None
        self._callback: Callable[[Any], Any] | None = None

    def wait(self) -> Any:
        """Wait for the answer; return the result, or raise the error."""
        interrupts.defer()
        try:
            self.read_until(_never)
        except BaseException:
            self._abandon()
            raise
        finally:
            interrupts.allow()
        return self.value()

    def value(self) -> Any:
        """Return the result of a complete call, or raise its error."""
        if self._make_error is not None:
            raise self._make_error()
        return self._result

    def on_done(self, callback: Callable[[Any], Any]) -> None:
        """Set the callback, which may run in the reader and must not wait. Call this once, right after sending."""
        self._callback = callback
        if self._make_error is not None and self._callback is not None:
            self._call_back()

    def _call_back(self) -> None:
        with _failing:
            callback, self._callback = self._callback, None
        if callback is not None:
            callback(self)

    def fail(self, make: Callable[[], BaseException]) -> None:
        """Set the error that `make` returns; an answer read meanwhile replaces the error. First claim the call."""
        with _failing:
            self._make_error = make
            if self._line is not None:
                self._line.has_failed = True
            self.ring()
        self._call_back()

    def ring(self) -> None:
        """Wake the thread that reads the line, which then checks again whether it may stop."""
        with _failing:
            line = self._line
            if line is not None:
                line.bell.ring()

    def read_until(self, is_ready: Callable[[], bool]) -> None:
        """Read the line until the call is complete or `is_ready()` is true; `ring` makes this check again."""
        while (line := self._line) is not None and not is_ready():
            ready = line.wait(line.bell.fileno(), _POLL_MS)
            interrupts.check()
            self._read(line, ready)

    def _read(self, line: CallerLine, ready: int) -> None:
        """Read the line if `ready & 1`, else check whether the call has failed. `ready & 2`: the bell rang."""
        if ready & 2:
            line.bell.drain()
        if ready & 1:
            frames = line.read()
            if frames is None:
                self._end(line)
            elif frames:
                self._finish(line, frames[0])
        elif self._make_error is not None:
            self._stop_waiting(line)

    @property
    def is_pending(self) -> bool:
        """Return whether the answer is still to be read."""
        return self._line is not None

    def _finish(self, line: CallerLine, frame: Frame) -> None:
        call = self._call
        is_ours = call.claim() or self._await_failure(line)
        self._line = self._call = None
        line.lines.release(line)
        self._result, self._make_error = self._caller.receive(line, frame, call)
        if is_ours and self._callback is not None:
            self._call_back()

    def _await_failure(self, line: CallerLine) -> bool:
        """Wait until the thread that has claimed the call has set its error; return False."""
        while self._make_error is None:
            line.bell.drain()
            if self._make_error is None:
                wait_ready(line.bell.fileno(), -1, 0, _POLL_MS)
        with _failing:
            return False

    def _end(self, line: CallerLine) -> None:
        """Close the line: the callee is lost, which the reader also detects, or the call was not sent completely."""
        if self._make_error is None:
            line.connection.shut_down()
        self._await_failure(line)
        with _failing:
            self._line = self._call = None
        line.close()

    def _stop_waiting(self, line: CallerLine) -> None:
        """Abandon the answer, because the call has timed out or this worker ends."""
        self._await_failure(line)
        self._abandon()

    def _abandon(self) -> None:
        with _failing:
            line, call, self._line, self._call = self._line, self._call, None, None
        if line is not None and call is not None:
            self._caller.abandon_answer(line, call)

    def close(self) -> None:
        """Close the line, because only a part of the call may have been sent."""
        line, self._line, self._call = self._line, None, None
        if line is not None:
            line.close()

    def __del__(self) -> None:
        self._abandon()


def _never() -> bool:
    return False


def read_any(answers: Sequence[LineAnswer]) -> None:
    """Wait up to a second until some line can be read or some bell rings, then read the lines that are ready."""
    poll = select.poll()
    lines = [(one, line) for one in answers if (line := one._line) is not None]
    for _, line in lines:
        for fd in (line.fd, line.bell.fileno()):
            poll.register(fd, select.POLLIN)
    ready = dict(poll.poll(_POLL_MS))
    interrupts.check()
    for one, line in lines:
        one._read(line, (line.fd in ready) + 2 * (line.bell.fileno() in ready))
