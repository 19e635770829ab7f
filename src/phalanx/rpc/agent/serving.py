"""Serve calls: decide which thread reads what comes in, and which ones run the functions that others call.

One thread leads: it waits for the sockets, hands answers to those who wait for them, and runs short functions itself,
so that a call costs no change of threads. Before a function that may take long (one that did before, or a new one) it
gives the lead away:

    leader     | read | f | f | g is new: give the lead away | g ................ | f | park
    follower   | parked                                      | read | f | read | f | f ..

The clock notices a function that was short and blocks this time. It looks every few milliseconds while the leader is in
user code, and gives the lead to another thread. So no function, however it blocks, keeps an answer waiting.
`num_threads` bounds how many functions run at once; threads beyond that read and hand out answers only.
"""

from __future__ import annotations

import contextlib
import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx._base.deadline import Deadline
from phalanx._base.ipc.wakeup import Wakeup
from phalanx.rpc.agent.ready import wait_ready
from phalanx.rpc.wire import Frame

SHORT_S = 300e-6  # a function that takes longer is run beside the leader
LATE_S = 5e-3  # after so long in user code another thread takes the lead
_SPIN_NS = 120_000  # a thread spins for so long before it sleeps, if it expects something soon
_SOON_S = 150e-6
_MOST_MISSES = 8
_AWAKE_S = 0.1  # the clock goes on looking for so long after the last call


class Readable(Protocol):
    """`Readable` is something for which the leader waits until it can be read."""

    def ready(self, events: int) -> None:
        """Read or write what is ready."""


class ServedRequest(Protocol):
    """`ServedRequest` is a call of another worker."""

    def prepare(self) -> bool:
        """Read the call; return whether it is expected to be short. Must not raise."""

    def run(self, more_follow: bool) -> None:
        """Run the function, and answer; the answer may wait for `flush` if `more_follow`. Must not raise."""


class Spin:
    """`Spin` decides how long a thread spins before it sleeps: while messages come soon, and otherwise now and then."""

    def __init__(self) -> None:
        self._since = 0.0
        self._misses = 0

    def begin(self) -> int:
        """Begin a wait, and return for how many nanoseconds to spin."""
        self._since = time.monotonic()
        return _SPIN_NS if self._misses < _MOST_MISSES or self._misses % _MOST_MISSES == 0 else 0

    def end(self) -> None:
        """End a wait, and learn from it."""
        self._misses = 0 if time.monotonic() - self._since < _SOON_S else self._misses + 1


class Relieved(Protocol):
    """`Relieved` is something that the clock checks as long as it is muted."""

    def relieve(self, now: float) -> None:
        """Give the leader what it has to read. Must not raise."""


@dataclass(eq=False)
class Lead:
    """`Lead` is the lead of one thread, until another one has it. `busy_since` is when it went into user code, or 0.

    It can be taken away only while the thread is in user code: what the thread reads and hands out stays in order.
    """

    busy_since: float = 0.0

    def enter_user_code(self) -> None:
        """Note that what this thread does now may run code of the user's, which may block."""
        self.busy_since = time.monotonic()


@dataclass(frozen=True, eq=False)
class Task:
    """`Task` is work that the leader does when its turn among the frames that come in has come.

    If there is no leader any more, `at_end` is done instead; without it nothing is done. Neither may raise.
    """

    run: Callable[[Lead], None]
    at_end: Callable[[], None] | None = None


@dataclass(eq=False)
class _Slot:
    """`_Slot` is where a thread without work waits."""

    gate: threading.Lock
    lead: Lead


class Serving:
    """`Serving` has the threads of one agent.

    What comes in goes into `incoming`: frames with the connection on which they came, and tasks. The leader takes one
    after the other, and gives frames to `handle`: that hands out answers, which may run the user's callbacks (it tells
    that to the `Lead`), and puts calls into `requests`.
    `flush` sends what was put aside; `tick(now)` is called by the clock when it is due, and returns when it wants to be
    called next. Neither `handle` nor `tick` may raise.
    """

    def __init__(
        self,
        num_threads: int,
        handle: Callable[[Any, Frame, Lead], None],
        flush: Callable[[], None],
        tick: Callable[[float], float],
    ) -> None:
        self._num_threads = num_threads
        self._handle = handle
        self._flush = flush
        self._tick = tick
        self._poll = select.epoll()
        self._readable: dict[int, Readable] = {}
        self.incoming: deque[tuple[Any, Frame] | Task] = deque()
        self.requests: deque[ServedRequest] = deque()
        self.muted: dict[Relieved, None] = {}  # connections that other threads read
        self._spin = Spin()
        self._lock = threading.Lock()
        self._parked: list[_Slot] = []
        self._threads: list[threading.Thread] = []
        self._leader: Lead | None = None
        self._running = 0
        self._last_call = 0.0
        self._closed = False
        self._wakeup = Wakeup()
        self._clock_wakeup = Wakeup()
        self._clock_sleeps = False
        self._due = math.inf  # the clock will tick by then; what is due later need not be told to it
        self._wanted: deque[float] = deque()  # by other threads: when the clock must tick
        self._inside = threading.local()
        self.watch(self._wakeup.fileno(), _Woken(self._wakeup))

    def start(self) -> None:
        self._start_thread("clock", self._be_clock)
        with self._lock:
            self._appoint()

    # -- what is waited for --------------------------------------------------------------------------------------------

    def watch(self, fd: int, readable: Readable, events: int = select.EPOLLIN) -> None:
        """Call `readable.ready(events)` when `fd` is."""
        self._readable[fd] = readable
        self._poll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Wait for other events of `fd`."""
        with contextlib.suppress(OSError, ValueError):  # nobody serves any more: a thread that waits reads for itself
            self._poll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop waiting for `fd`."""
        if self._readable.pop(fd, None) is not None:
            with contextlib.suppress(OSError, ValueError):
                self._poll.unregister(fd)

    def wake(self) -> None:
        """Make the leader check its queue. It takes no lock, since finalizers may call it."""
        self._wakeup.ring()

    def wake_clock(self, due: float) -> None:
        """Have the clock tick by `due`. It takes no lock, since finalizers may call it."""
        if due < self._due:
            self._due = due
            self._wanted.append(due)  # the clock may overwrite `_due` at this moment
            if self._clock_sleeps:
                self._clock_wakeup.ring()

    def touch(self) -> None:
        """Wake the clock, because something happens."""
        self._last_call = time.monotonic()
        if self._clock_sleeps:
            self._clock_wakeup.ring()

    @property
    def due(self) -> float:
        """Return when the clock will tick."""
        return self._due

    @property
    def is_leader(self) -> bool:
        lead = getattr(self._inside, "lead", None)
        return lead is not None and lead is self._leader

    def run_here(self, work: Callable[[], None]) -> None:
        """Run work that is expected to be short, in the leader, while it hands out frames. `work` must not raise."""
        lead: Lead = self._inside.lead
        lead.busy_since = time.monotonic()
        work()

    @property
    def num_running(self) -> int:
        """Return how many functions run."""
        return self._running

    def put(self, item: tuple[Any, Frame] | Task) -> None:
        """Queue an item for the leader, behind everything that came before it."""
        self.incoming.append(item)
        self.wake()

    # -- the threads ---------------------------------------------------------------------------------------------------

    def _start_thread(self, what: str, body: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=body, args=args, name=f"phalanx-rpc-{what}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _appoint(self) -> None:
        """Give the lead to a thread without work; the caller holds the lock."""
        if self._closed:
            return
        lead = self._leader = Lead()
        if self._parked:
            slot = self._parked.pop()
            slot.lead = lead
            slot.gate.release()
        else:
            self._start_thread("serve", self._serve, lead)

    def _serve(self, lead: Lead) -> None:
        slot = _Slot(threading.Lock(), lead)
        slot.gate.acquire()
        while True:
            self._be_leader(slot.lead)
            while self._run_one(None):
                pass
            self._flush()
            with self._lock:
                if self._closed:
                    return
                self._parked.append(slot)
            slot.gate.acquire()
            if self._is_closed():
                return

    def _is_closed(self) -> bool:
        return self._closed

    def _be_leader(self, lead: Lead) -> None:
        poll, incoming, requests, handle = self._poll.poll, self.incoming, self.requests, self._handle
        poll_fd, spin = self._poll.fileno(), self._spin
        self._inside.lead = lead
        while self._leader is lead and not self._closed:
            while incoming and self._leader is lead:
                item = incoming.popleft()
                if isinstance(item, tuple):
                    connection, frame = item
                    handle(connection, frame, lead)
                else:
                    item.run(lead)
                lead.busy_since = 0.0
            while requests and self._leader is lead and self._run_one(lead):
                lead.busy_since = 0.0
            if self._leader is not lead:
                return
            self._flush()
            if incoming:
                continue
            wait_ready(poll_fd, -1, spin.begin(), -1)
            spin.end()
            for fd, events in poll(0):
                self.touch()
                readable = self._readable.get(fd)
                if readable is not None:
                    readable.ready(events)

    def _run_one(self, lead: Lead | None) -> bool:
        """Run the next request; return False if there is none, or if as many run as may."""
        if self._running >= self._num_threads or self._closed:
            return False
        try:
            request = self.requests.popleft()
        except IndexError:
            return False
        if lead is not None:
            lead.busy_since = time.monotonic()
        is_short = request.prepare()
        with self._lock:
            self._running += 1
            if lead is not None and self._leader is lead and not is_short:
                self._appoint()
        if not is_short:
            self._flush()
        try:
            request.run(self._leader is lead and bool(self.requests))
        finally:
            with self._lock:
                self._running -= 1
        return True

    # -- the clock -----------------------------------------------------------------------------------------------------

    def _be_clock(self) -> None:
        poll = select.poll()
        poll.register(self._clock_wakeup, select.POLLIN)
        due = math.inf
        while not self._closed:
            due = self._next_due(due)
            now = time.monotonic()
            if now >= due:
                self._due = math.inf  # this comes first: whoever wants an earlier tick from here on tells the clock
                due = self._tick(now)
                self._due = min(due, self._due)
            busy = self._relieve(now)
            if now - self._last_call >= _AWAKE_S:
                self._clock_sleeps = True
            due = self._next_due(due)
            watching = busy or now - self._last_call < _AWAKE_S
            timeout_s = min(LATE_S if watching else 3600.0, max(0.0, due - time.monotonic()))
            poll.poll(timeout_s * 1000)
            self._clock_sleeps = False
            self._clock_wakeup.drain()

    def _next_due(self, due: float) -> float:
        """Return `due`, or an earlier time that another thread wants."""
        while self._wanted:
            due = min(due, self._wanted.popleft())
        return due

    def _relieve(self, now: float) -> bool:
        """Give the lead to another thread if the leader has been in user code for too long; return whether the clock
        has something to watch.
        """
        for one in list(self.muted):
            one.relieve(now)
        lead = self._leader
        if lead is None or not lead.busy_since:
            return bool(self.muted)
        if now - lead.busy_since > LATE_S:
            with self._lock:
                if self._leader is lead and lead.busy_since:
                    self._appoint()
        return True

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 5.0) -> None:
        """End the threads; one that is in user code ends when it comes back, and nobody waits for it."""
        with self._lock:
            self._closed = True
            parked, self._parked = self._parked, []
        for slot in parked:
            slot.gate.release()
        self.wake()
        self._clock_wakeup.ring()
        deadline = Deadline.after(timeout_s)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(min(deadline.left_s, 0.2) if self._running else deadline.left_s)
        if not any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread()):
            self._poll.close()
            self._wakeup.close()
            self._clock_wakeup.close()


class _Woken:
    """`_Woken` is the leader's wakeup."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup

    def ready(self, events: int) -> None:
        self._wakeup.drain()
