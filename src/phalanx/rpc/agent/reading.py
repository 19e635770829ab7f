"""Decide who reads the answers on a connection: the thread that waits for one, or else the leader.

A thread that waits for the answer of a call takes its turn, and reads the connection itself: no other thread has to
wake it, nor to get Python's lock before it. While it does, and until calls are under way for which nobody waits, the
leader does not look at the connection (it is muted: only its end is heard).

    caller     call | ........ reads: its answer | call | call | call | reads: all that have come | call
    leader     sleeps                                                                        sleeps

The thread also hands out what it reads for others, except for answers that a callback waits for, or that run code of
the user's as they are unpickled: these are the leader's, since the thread may hold what that code wants (a lock of the
user's). So are all answers that come to a thread in one of torch's modes, which would see them. A thread that is stuck
in what its own answer runs as it is unpickled loses its turn to the leader after a few milliseconds, by the clock.
The connection also becomes the leader's again if it was expected that some thread would wait, and none does.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from torch.futures import Future

from phalanx._base.ipc.wakeup import Wakeup
from phalanx._base.log import get_logger
from phalanx._base.torch_names import find
from phalanx.rpc.agent import interrupts
from phalanx.rpc.agent.ready import wait_ready
from phalanx.rpc.agent.serving import LATE_S, Serving, Spin
from phalanx.rpc.unix_connection import UnixConnection
from phalanx.rpc.wire import Frame

_Future: Any = find("torch._C.Future", loses="phalanx.rpc does not work")

T = TypeVar("T")
_logger = get_logger(__name__)
_IDLE_S = 0.05  # a muted connection on which nothing happens for so long becomes the leader's again
_CLAIM_S = 20e-6
# how often a thread checks whether the answer is there, if a callback may keep the thread from hearing it
_LOOK_S = 0.01
# so many threads must have waited for a call, at first and at most, before the next one is expected to
_FIRST, _MOST = 4, 1 << 14


class Answer(Future[T]):
    """`Answer` is the future of a call. `reading` is that of the connection on which the answer comes."""

    reading: Reading | None = None
    has_callbacks = False
    is_claimed = False  # a thread other than the leader is setting it

    def done(self) -> bool:
        """Return whether the answer is there. A thread that asks repeatedly waits for it: then the leader reads."""
        if _Future.done(self):
            return True
        if self.reading is not None:
            self.reading.unmute()
        return False

    def wait(self) -> T:
        reading = self.reading
        if reading is not None and not _Future.done(self):
            reading.read_until(self, self._wait)
        return wait_interruptibly(self)  # type: ignore[no-any-return]

    def _wait(self) -> None:
        wait_interruptibly(self)

    def has_come(self) -> bool:
        """Return whether the answer is there; changes nothing."""
        return bool(_Future.done(self))

    def hear(self, callback: Callable[[Any], Any]) -> None:
        """Add a short callback of a thread that will also wait for the answer."""
        _Future.add_done_callback(self, callback)

    def then(self, callback: Any) -> Any:
        """Call torch's `then`; the leader sets the answer from now on."""
        self.needs_leader()
        return super().then(callback)

    def add_done_callback(self, callback: Any) -> None:
        """Call torch's `add_done_callback`; the leader sets the answer from now on."""
        self.needs_leader()
        super().add_done_callback(callback)

    def claim(self) -> bool:
        """Return whether this thread, not the leader, may set the answer at once: not if a callback waits for it."""
        self.is_claimed = True
        if self.has_callbacks:
            self.is_claimed = False
        return self.is_claimed

    def needs_leader(self) -> None:
        """Have the leader set the answer, as a callback is about to be added: it must not run in a reading thread."""
        self.has_callbacks = True
        while self.is_claimed and not _Future.done(self):  # too late: it will be done, or unclaimed, at once
            time.sleep(_CLAIM_S)
        self.rang()  # a thread that reads for it has to check by itself from now on
        if self.reading is not None:
            self.reading.unmute()

    def rang(self) -> None:
        """Wake a thread that reads for this call, because another thread has set the answer."""
        reading = self.reading
        if reading is not None:
            reading.ring(self)


def wait_interruptibly(future: Any) -> Any:
    """Wait for the future and return its value; in the main thread, unlike torch's `Future.wait`, handle signals."""
    if not _Future.done(future) and threading.current_thread() is threading.main_thread():
        gate = threading.Lock()
        gate.acquire()
        _Future.add_done_callback(future, lambda _: gate.release())
        interrupts.wait(partial(_pass, gate, future))
    return _Future.wait(future)


def _pass(gate: threading.Lock, future: Any) -> None:
    """Wait until the gate is open; earlier callbacks may want a lock that this thread holds, and keep it closed."""
    while not gate.acquire(timeout=_LOOK_S if getattr(future, "has_callbacks", True) else 3600.0):
        if _Future.done(future):
            return


class Caller(Protocol):
    """`Caller` has made the calls that are answered on a connection."""

    calls: dict[int, Any]  # the calls that are under way

    def take(self, number: int) -> Any:
        """Return the call with this number, and forget it; None if it is not under way, or not any more."""


class Awaited(Protocol):
    """`Awaited` is what a thread reads for. Code that completes it in another thread must call the reading's `ring`."""

    def has_come(self) -> bool:
        """Return whether it is there."""


class _Turn:
    """`_Turn` belongs to one thread. `busy_since` is when the thread began to hand out answers, or 0.

    It may lie inside of another turn of the thread, `outer`: a finalizer ran meanwhile, and makes a call.
    """

    __slots__ = ("awaited", "busy_since", "outer", "thread")

    def __init__(self, awaited: Awaited, outer: _Turn | None = None) -> None:
        self.awaited = awaited
        self.outer = outer
        self.thread = threading.get_ident()
        self.busy_since = 0.0


class Reading:
    """`Reading` reads one connection on which `caller` calls. `take(connection, frame, call, is_awaited)` hands out
    what has come; the thread waits for this very call if `is_awaited`.
    """

    def __init__(
        self,
        connection: UnixConnection,
        caller: Caller,
        serving: Serving,
        take: Callable[[UnixConnection, Frame, Any, bool], Any],
    ) -> None:
        self._connection = connection
        self._caller = caller
        self._serving = serving
        self._take = take
        self._lock = threading.RLock()  # a finalizer of the user's may run where it is held
        self._turn: _Turn | None = None
        self._pending: deque[Frame] = deque()
        self._wakeup = Wakeup()
        self._spin = Spin()
        self._is_muted = False
        self._num_others = 0  # how many threads wait while another one reads
        self._num_waits = 0  # how often a thread has waited for a call, so that the leader did not have to read
        self._needed_waits = _FIRST
        self._last = 0.0
        self._left = threading.Event()  # set at the end of the connection: nobody reads any more
        self._is_closed = False

    # -- of who calls --------------------------------------------------------------------------------------------------

    def sent(self) -> None:
        """Note that a call is under way for which no thread waits yet."""
        if self._is_muted and self._turn is None and self._num_waits < self._needed_waits:
            self.unmute()

    def read_until(self, awaited: Awaited, wait: Callable[[], None]) -> None:
        """Read until `awaited` has come, or the connection ends; call `wait` if another thread reads."""
        interrupts.defer()
        try:
            self._read_until(awaited, wait)
        finally:
            interrupts.allow()

    def _read_until(self, awaited: Awaited, wait: Callable[[], None]) -> None:
        if interrupts.may_raise():
            self.unmute()
            interrupts.wait(wait)
            return
        turn = self._begin(awaited, 0)
        if turn is None:
            with self._lock:  # a thread that reads sees it when it leaves; and it may just have left
                self._num_others += 1
            try:
                turn = self._begin(awaited, 1)
                if turn is None:
                    interrupts.wait(wait)
                    return
            finally:
                with self._lock:
                    self._num_others -= 1
        try:
            self._read_until_done(turn)
        finally:
            self._end(turn)

    # -- a turn --------------------------------------------------------------------------------------------------------

    def _begin(self, awaited: Awaited, most_others: int) -> _Turn | None:
        """Return the turn of this thread; None if another thread has it, or several wait: the leader reads for all."""
        outer = self._turn
        if outer is not None:
            if outer.thread != threading.get_ident():
                return None
        elif self._num_others > most_others:
            return None
        turn = _Turn(awaited, outer)
        with self._lock:
            if self._turn is not outer or self._is_closed:
                return None
            if not self._is_muted:
                self._connection.mute(True)
                self._is_muted = True
                self._serving.muted[self] = None
            self._turn = turn
        self._serving.touch()
        return turn

    def _read_until_done(self, turn: _Turn) -> None:
        awaited, pending, connection = turn.awaited, self._pending, self._connection
        fd, bell = connection.socket.fileno(), self._wakeup.fileno()
        while not awaited.has_come() and self._turn is turn and not self._is_closed:
            if not pending:
                look_ms = int(_LOOK_S * 1000) if getattr(awaited, "has_callbacks", False) else 1000
                ready = wait_ready(fd, bell, self._spin.begin(), look_ms)
                self._spin.end()
                interrupts.check()
                if ready & 2:
                    self._wakeup.drain()
                if ready & 1:
                    frames = self._read_frames()
                    if frames is None:  # the leader notices it as well
                        return
                    pending.extend(frames)
            turn.busy_since = time.monotonic()
            while (found := self._next(turn)) is not None:
                frame, call = found
                self._take(connection, frame, call, call is not None and call.future is awaited)
            turn.busy_since = 0.0

    def _read_frames(self) -> list[Frame] | None:
        """Return the frames that have come; None at the end of the connection."""
        connection = self._connection
        try:
            return connection.read() if not connection.closed else None
        except Exception as error:  # the frames are malformed, which does not concern the call that is waited for
            _logger.error("rpc: the connection to %s is given up: %s", connection.peer, error)
            with contextlib.suppress(OSError):  # the leader notices the end, and fails all calls
                connection.socket.shutdown(socket.SHUT_RDWR)
            return None

    def _next(self, turn: _Turn) -> tuple[Frame, Any] | None:
        """Return the frame that this thread hands out next, and the call that it answers; None if there is no more, or
        if the thread has lost its turn.

        Both are taken at once: a frame that a thread has read is its own to hand out, or the leader's, never nobody's.
        """
        with self._lock:
            while self._turn is turn and self._pending:
                frame = self._pending.popleft()
                call = self._caller.calls.get(frame.call)
                if call is None:
                    return frame, None
                if not call.future.has_callbacks:
                    return frame, self._caller.take(frame.call)
                self._serving.incoming.append((self._connection, frame))
                self._serving.wake()
        return None

    def _end(self, turn: _Turn) -> None:
        with self._lock:
            if self._turn is not turn:  # it was taken away
                return
            self._turn = turn.outer
            if self._turn is not None:
                return
            self._last = time.monotonic()
            if self._is_closed or self._pending:  # it is left at the end, or by an exception
                self._give_back()
            if self._is_closed:
                self._left.set()
                return
        if self._caller.calls:
            self._num_waits += 1
            if self._num_others or self._num_waits < self._needed_waits:
                self.unmute()

    def ring(self, awaited: Awaited) -> None:
        """Wake another thread that reads until `awaited` has come, because it has."""
        turn = self._turn
        if turn is not None and turn.awaited is awaited and turn.thread != threading.get_ident():
            with self._lock:
                self._wakeup.ring()

    # -- of the leader and the clock -----------------------------------------------------------------------------------

    def unmute(self) -> None:
        """Let the leader read, unless a thread has its turn."""
        if self._is_muted and self._turn is None:
            with self._lock:
                if self._is_muted and self._turn is None:
                    self._give_back()

    def _give_back(self) -> None:
        """Give the connection back to the leader; the caller holds the lock."""
        self._is_muted = False
        self._serving.muted.pop(self, None)
        if self._pending:
            while self._pending:
                self._serving.incoming.append((self._connection, self._pending.popleft()))
            self._serving.wake()
        self._connection.mute(False)

    def relieve(self, now: float) -> None:
        """Take a stuck thread's turn away, and give connections without readers to the leader. The clock calls this."""
        turn = self._turn
        if turn is not None:
            if turn.busy_since and now - turn.busy_since > LATE_S:
                with self._lock:
                    if self._turn is turn and turn.busy_since:
                        self._turn = None
                        self._give_back()
                        if self._is_closed:
                            self._left.set()
        elif self._caller.calls:
            if now - self._last > LATE_S / 2:  # nobody waits for them
                self._num_waits = 0
                self._needed_waits = min(4 * self._needed_waits, _MOST)
                self.unmute()
        elif now - self._last > _IDLE_S:
            self.unmute()

    def finish(self, timeout_s: float = 1.0) -> None:
        """Let only the leader read from now on; frames read and not handed out are in its queue on return.

        A thread that hands out what it has read goes on with the one answer that it has taken, and leaves the rest.
        """
        with self._lock:
            if self._is_closed:
                return
            turn = self._turn
            self._is_closed = True
            if turn is None or turn.busy_since:
                self._turn = turn = None
                self._give_back()
        if turn is not None and turn.thread != threading.get_ident():
            self._wakeup.ring()
            self._left.wait(timeout_s)

    def close(self) -> None:
        """End the connection: a thread that reads leaves, and then the sockets can be closed."""
        self.finish()
        with self._lock:
            self._turn = None
            self._serving.muted.pop(self, None)
            self._wakeup.close()

    def abandon(self) -> None:
        """Close the wakeup in a fork."""
        self._wakeup.close()
