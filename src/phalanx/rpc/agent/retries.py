"""Make calls again that may run twice (`idempotent`), when the worker that had them was lost.

    send ──► lost ──► wait until a worker of that name has joined ──► send ──► …   until the call's time is up

One thread waits for all of them; there is none while no worker is missing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.futures import Future

from phalanx.deadline import Deadline
from phalanx.errors import ClosedError, DeadlineError, PeerLostError
from phalanx.rpc import remote_error
from phalanx.rpc.agent.reading import Answer
from phalanx.rpc.remote_error import error_of, set_error

_FIRST_PAUSE_S = 0.01
_MOST_PAUSE_S = 0.2

# It makes the call, with so many seconds (0: no limit), and returns the future. It raises PeerLostError if no worker
# has the name now.
Send = Callable[[float], Future[Any]]


@dataclass(eq=False)
class _Call:
    what: str  # such as "rpc_sync(f) to worker s1"
    to: Hashable
    send: Send
    deadline: Deadline
    future: Future[Any] = field(default_factory=Answer)
    num_lost: int = 0
    why: str = ""


class Retries:
    """`Retries` makes calls of one worker again. `is_there(to)` says whether a worker of that name is there; it may ask
    the job's store.

    `run_later(work)` does what may run callbacks of the user, which may block: the thread that waits for all must not.
    """

    def __init__(self, is_there: Callable[[Any], bool], run_later: Callable[[Callable[[], None]], None]) -> None:
        self._is_there = is_there
        self._run_later = run_later
        self._lock = threading.Lock()
        self._missing: list[_Call] = []
        self._num_under_way = 0
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()
        self._closed = False

    @property
    def num_under_way(self) -> int:
        """Return how many calls are neither answered nor given up."""
        return self._num_under_way

    def call(self, what: str, to: Hashable, send: Send, timeout_s: float) -> Future[Any]:
        """Make a call, and again if its worker is lost. At first it raises what `send` raises, unless the worker is
        lost.
        """
        call = _Call(f"{what} to worker {to}", to, send, Deadline.after(timeout_s or None))
        with self._lock:
            self._num_under_way += 1
        try:
            self._send(call)
        except BaseException:
            self._end()
            raise
        return call.future

    def _end(self) -> None:
        with self._lock:
            self._num_under_way -= 1

    def _send(self, call: _Call) -> None:
        left_s = 0.0 if call.deadline.timeout_s == float("inf") else max(call.deadline.left_s, 1e-3)
        try:
            sent = call.send(left_s)
        except PeerLostError as error:
            self._lose(call, str(error))
        else:
            sent.add_done_callback(partial(self._hear, call))

    def _hear(self, call: _Call, done: Future[Any]) -> None:
        """Note that the call was answered, or has failed."""
        try:
            value = done.value()
        except PeerLostError as error:
            if error.__cause__ is None:  # otherwise the function itself has raised it, at the callee
                self._lose(call, str(error))
                return
        except DeadlineError as error:
            if call.num_lost and error.__cause__ is None:
                self._expire(call)
                return
        except BaseException:
            pass
        else:
            self._end()
            call.future.set_result(value)
            return
        self._end()
        set_error(call.future, lambda: error_of(done))

    def _expire(self, call: _Call) -> None:
        self._end()
        set_error(call.future, partial(_describe_timeout, call))

    def _lose(self, call: _Call, why: str) -> None:
        call.num_lost += 1
        call.why = why
        with self._lock:
            closed = self._closed
            if not closed:
                self._missing.append(call)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="phalanx-rpc-retry", daemon=True)
                    self._thread.start()
        if closed:
            self._close_call(call)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._lock:
                calls, self._missing = self._missing, []
                if not calls or self._closed:
                    self._missing = calls
                    self._thread = None
                    return
            there = {to: self._find(to) for to in {call.to for call in calls}}
            for call in calls:
                if call.deadline.passed:
                    self._run_later(partial(self._expire, call))
                    continue
                if not there[call.to]:
                    with self._lock:
                        self._missing.append(call)
                    continue
                try:
                    self._send(call)
                except ClosedError:
                    self._run_later(partial(self._close_call, call))
                except BaseException as error:  # an argument cannot be pickled any more
                    self._run_later(partial(self._refuse, call, remote_error.pack(error, "this worker")))
            pause_s = _FIRST_PAUSE_S if any(there.values()) else min(2 * pause_s, _MOST_PAUSE_S)
            self._woken.wait(pause_s)

    def _find(self, to: Hashable) -> bool:
        with contextlib.suppress(RuntimeError):  # the job's store is gone: no worker joins any more
            return self._is_there(to)
        return False

    def _refuse(self, call: _Call, error: bytes) -> None:
        self._end()
        set_error(call.future, partial(remote_error.unpack, error))

    def _close_call(self, call: _Call) -> None:
        self._end()
        text = f"{call.what}: this worker was shut down before another one came in its place: {call.why}"
        set_error(call.future, partial(ClosedError, text))

    def close(self) -> None:
        """Stop making calls again; those that wait for a worker fail."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._woken.set()
        if thread is not None:
            thread.join(5.0)
        with self._lock:
            calls, self._missing = self._missing, []
        for call in calls:
            self._run_later(partial(self._close_call, call))


def _describe_timeout(call: _Call) -> DeadlineError:
    return DeadlineError(
        f"{call.what}: no answer within {call.deadline.timeout_s:.1f} s, in which it was lost {call.num_lost} times "
        f"with its worker. The last time:\n{call.why}"
    )
