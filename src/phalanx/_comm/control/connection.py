"""A client's `Connection` to the coordinator: a request blocks until its answer or deadline; events are queued.

Any number of threads may use it at once; `Reader` decides which of them reads the socket. A member also has a heartbeat
thread (see `member_connection`).
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

import zmq

from phalanx._base.deadline import Deadline
from phalanx._base.ipc.wakeup import Wakeup
from phalanx._base.loss_detection import COORDINATOR_SILENT_S, MEMBER_TIMEOUT_S, heartbeat_s
from phalanx._comm.control.address import Address
from phalanx._comm.control.connection_guard import send_in_pieces
from phalanx._comm.control.dealer import EPOCH_BYTES, EVENTS, HEARTBEAT_S, open_dealer
from phalanx._comm.control.event import Event
from phalanx._comm.control.key import Key
from phalanx._comm.control.pending_call import PendingCall, Request, pack_calls
from phalanx._comm.control.route import NoRouteError, Route, find_route, who_answers
from phalanx._comm.control.wire import (
    MAX_MESSAGES,
    VERSION,
    AnswerStatus,
    Op,
    WireError,
    pack,
    pack_number,
    unpack,
    unpack_number,
)
from phalanx.errors import AuthenticationError, ClosedError, CoordinationError, DeadlineError

_LONGEST_POLL_S = 3.0  # after each poll, overdue requests are sent again
_MAX_CALLS = 400  # the maximum number of concurrent calls; the coordinator remembers more answers than that
_HANDSHAKES, _HANDSHAKES_S = 2, 1.0  # diagnose after this many failed handshakes, over at least this time
_DIAGNOSIS_S = 2.0

# Plain numbers: pyzmq's enumerations cost more than the operations that use them.
_NOBLOCK, _POLLIN, _READY = int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.EVENTS)

Timeout = float | timedelta | None


class Connection:
    """A `Connection` connects a client to the coordinator. Its constructor finds a route, connects and authenticates.

    Arguments:
        address: HOST:PORT, or the path of the coordinator's socket on this host.
        key: the job's key; a path needs none.
        timeout: for connecting, and for each call that passes no timeout.
        job: the job's name, which must match the coordinator's if both have one.
        context: the ZeroMQ context to use; by default the connection creates its own.
        heartbeat_s: the interval between ZeroMQ's heartbeats; a member needs few, because it sends its own.

    Raises:
        AuthenticationError: the coordinator has a different key, or no key was given.
        CoordinationError: no coordinator answers at the address (the message lists every address tried), or the
            coordinator serves another job or speaks another version of the protocol.
        DeadlineError: there was no answer in time.
    """

    def __init__(
        self,
        address: str | Address,
        key: Key | None = None,
        *,
        timeout: Timeout = 30.0,
        job: str = "",
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.address = Address.parse(address) if isinstance(address, str) else address
        if key is None and not self.address.path:
            raise without_key(self.address)
        self.timeout = timeout
        self.member = -1
        self.is_removed = False  # the coordinator no longer counts this process as a member
        self.job = job
        self.key = key
        self._given_context, self._heartbeat_s = context, heartbeat_s
        self._is_closed = False
        self._reset()
        try:
            self._connect(Deadline.after(timeout))
        except BaseException:
            self._free()
            raise

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the socket and all attributes below
        self._slots = CallSlots(_MAX_CALLS)
        self._calls: dict[int, PendingCall] = {}
        self._number = 0
        self._epoch = b""
        self._former_epochs: set[bytes] = set()  # epochs of the coordinators that this connection has left
        self._was_connected = False
        self._cut_at: float | None = None
        self._refused_at: float | None = None  # when the coordinator's port was first found closed
        self._failed, self._failed_at = 0, 0.0
        self._suspect: Route | None = None  # a route whose handshakes fail; it will be diagnosed
        self._received_at = time.monotonic()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._route: Route | None = None
        self._wakeup: Wakeup | None = None
        self._reader = Reader(self._lock, self._calls)
        self._inbox = EventInbox()
        self._beat_s = 1.0
        self._lost_after_s = MEMBER_TIMEOUT_S
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._is_silent = False

    # Connecting.

    def _connect(self, deadline: Deadline) -> None:
        endpoint = self.address.endpoint
        if not self.address.path:
            self._route = self._find(deadline)
            endpoint = self._route.address.endpoint
        elif not os.path.exists(self.address.path):
            raise CoordinationError(
                f"there is no coordinator at {self.address.path}: it has ended, or was never started.",
                reason="unreachable",
            )
        self._context = self._given_context or zmq.Context(io_threads=1)
        dealer = self._socket = open_dealer(self._context, None if self.address.path else self.key, self._heartbeat_s)
        self._monitor = dealer.get_monitor_socket(EVENTS)
        self._wakeup = self._reader.wakeup = Wakeup()
        self._poll = select.poll()
        for fd in (int(dealer.fd), int(self._monitor.fd), self._wakeup.fileno()):
            self._poll.register(fd, select.POLLIN)
        dealer.connect(endpoint)
        try:
            said, lost_after = self._call(Op.HELLO, pack_number(VERSION), deadline=deadline)
        except ValueError as error:  # the coordinator speaks another version of the protocol
            raise CoordinationError(f"{self._where}: {error}.", reason="stranger") from None
        job = said.decode()
        if self.job and job and self.job != job:
            raise CoordinationError(f"{self._where} belongs to job {job!r}, not to {self.job!r}.", reason="another job")
        self.job = self.job or job
        self._lost_after_s = float(lost_after)
        self._beat_s = heartbeat_s(self._lost_after_s)

    def redirect(self, address: Address, epoch: bytes, timeout: Timeout = None) -> None:
        """Switch to the standby that has taken over; it knows this client, and which of its requests were answered.

        Raises:
            CoordinationError: there is no coordinator at the address.
            ClosedError: this client was closed.
        """
        deadline = self._deadline(timeout)
        before, self.address = self.address, address
        try:
            route = self._find(deadline)
        except CoordinationError:
            self.address = before
            raise
        with self._lock:
            if self._socket is None or self._is_closed:
                raise ClosedError(f"{self._where}: this client was closed")
            self._socket.disconnect(before.endpoint if self._route is None else self._route.address.endpoint)
            self._route = route
            self._former_epochs.add(self._epoch)
            self._epoch = epoch
            self._cut_at = self._refused_at = None
            self._received_at = time.monotonic()
            self._socket.connect(route.address.endpoint)

    def _find(self, deadline: Deadline) -> Route:
        try:
            return find_route(self.address, deadline)
        except NoRouteError as error:
            raise unreachable(self.address, error) from None

    @property
    def endpoint(self) -> str:
        """Return the coordinator's address as a ZeroMQ endpoint."""
        return self.address.endpoint if self._route is None else self._route.address.endpoint

    @property
    def own_host(self) -> str:
        """Return this host's address on the route to the coordinator; "" on the coordinator's local socket."""
        return self._route.own_host if self._route is not None else ""

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def _where(self) -> str:
        return f"the coordinator at {self.address}"

    def close(self) -> None:
        """Close the connection. A member that has not left counts as lost. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = self._reader.is_closed = True
        if os.getpid() == self._pid:
            self._stop.set()
            self._ring()
            if self._thread is not None:
                self._thread.join()
            for call in list(self._calls.values()):
                self._finish(call, ClosedError(f"{self._where}: this client was closed"))
            with self._reader.turn:
                self._free()

    def _free(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.disable_monitor()
                if self._monitor is not None:
                    self._monitor.close(0)
                self._socket.close(0)
                self._socket = None
            if self._context is not None and self._given_context is None:
                self._context.term()
            if self._wakeup is not None:
                self._wakeup.close()
            self._inbox.close()

    # Requests.

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(self.timeout if timeout is None else timeout)

    def _call(
        self, what: int, *fields: bytes, deadline: Deadline | None = None, waits_for: Iterable[str] = ()
    ) -> list[bytes]:
        if deadline is None:
            deadline = Deadline.after(self.timeout)
        call = self._send_request(what, *fields, deadline=deadline)
        try:
            self._await(call, deadline)
        finally:
            self._release_call(call)  # the call is unanswered after a timeout or Ctrl-C
        if not call.is_over:
            raise self._late(deadline, waits_for)
        return call.result(self._where)

    def _send_request(self, what: int, *fields: bytes, deadline: Deadline) -> PendingCall:
        """Send a request; the caller must pass the result to `_release_call`."""
        return self._send_requests([(what, fields)], deadline)[0]

    def _send_requests(self, requests: Sequence[Request], deadline: Deadline) -> list[PendingCall]:
        """Send at most `MAX_MESSAGES` requests in one frame; the caller must pass each result to `_release_call`."""
        if os.getpid() != self._pid:
            self._revive(deadline)
        if self._is_closed:
            raise ClosedError(f"{self._where}: this client was closed")
        if not self._slots.acquire(len(requests), deadline.left_s):
            raise DeadlineError(f"{self._where}: this process has too many calls waiting (at most {_MAX_CALLS}).")
        try:
            with self._lock:
                if self._socket is None:
                    raise ClosedError(f"{self._where}: this client was closed")
                calls = pack_calls(requests, self._number + 1)
                self._number += len(calls)
                self._calls.update((call.number, call) for call in calls)
                self._transmit(*calls)
                self._read()
        except BaseException:
            self._slots.release(len(requests))
            raise
        return calls

    def _await(self, call: PendingCall, deadline: Deadline) -> None:
        """Wait until the request is answered or has failed; after the deadline, return with the request pending."""
        while not call.is_over and not deadline.passed:
            self._reader.wait(call, deadline, self._poll_once)
        if not call.is_over:  # this process may have been stopped (SIGSTOP) with the answer unread
            self._try_read(call)

    def _try_read(self, call: PendingCall) -> None:
        """Read the data that has arrived, unless another thread is reading."""
        self._reader.try_read(call, self._poll_once)

    def _release_call(self, call: PendingCall) -> None:
        """Release the request's slot, and cancel the request at the coordinator if it is unanswered."""
        try:
            if not call.is_over:
                self._cancel(call)
        finally:
            self._slots.release()

    def _cancel(self, call: PendingCall) -> None:
        with self._lock:
            if self._calls.pop(call.number, None) is not None and self._socket is not None:
                self._transmit_raw(pack(Op.CANCEL, 0, pack_number(call.number)))
                self._read()

    def _late(self, deadline: Deadline, waits_for: Iterable[str]) -> DeadlineError:
        silent_s, is_cut = time.monotonic() - self._received_at, self._cut_at is not None
        return late(self._where, deadline.timeout_s, list(waits_for), silent_s, is_cut=is_cut)

    # ZeroMQ's descriptor is edge-triggered, and a send may clear the edge that another thread polls for: call `_read`
    # after each send, before releasing the lock.

    def _transmit(self, *calls: PendingCall) -> None:
        now = time.monotonic()
        for call in calls:
            call.note_sent(now)
        self._transmit_raw(b"".join([call.message for call in calls]))

    def _transmit_raw(self, message: bytes) -> None:
        try:
            assert self._socket is not None
            send_in_pieces(self._socket, message)
        except zmq.Again:  # the socket's queue is full; a request is sent again later
            pass

    def _send_heartbeat(self) -> None:
        if self.member >= 0:
            beat = (pack_number(self._inbox.last), pack_number(self.member))
            self._transmit_raw(pack(Op.HEARTBEAT, self._inbox.consumed, *beat))
            self._inbox.note_reported()

    def _poll_once(self, limit_s: float) -> None:
        """Wait at most `limit_s` for data, read it, and repeat overdue requests. The caller holds `Reader.turn`."""
        if self._suspect is not None:
            self._diagnose(self._suspect, limit_s)
            return
        ready = self._poll.poll(min(limit_s, _LONGEST_POLL_S) * 1000 + 1)
        with self._lock:
            if self._socket is None:
                return
            if self._wakeup is not None and any(fd == self._wakeup.fileno() for fd, _ in ready):
                self._wakeup.drain()
            self._read()
            now = time.monotonic()
            if self._cut_at is not None and now - self._cut_at > 3 * self._lost_after_s:
                self._fail_all(cut_off(self._where, now - self._cut_at))
            unanswered = [call for call in self._calls.values() if now > call.resend_at]
            for call in unanswered[:MAX_MESSAGES]:
                self._transmit(call)
            if unanswered:
                self._read()

    def _read(self) -> None:
        """Read everything that has arrived. The caller holds the lock."""
        dealer, monitor = self._socket, self._monitor
        assert dealer is not None
        assert monitor is not None
        while int(monitor.get(_READY)) & _POLLIN:
            self._note(int.from_bytes(monitor.recv_multipart(_NOBLOCK)[0][:2], "little"))
        while int(dealer.get(_READY)) & _POLLIN:
            frame = b"".join(dealer.recv_multipart(_NOBLOCK))
            self._received_at = time.monotonic()
            epoch = frame[:EPOCH_BYTES]
            if epoch != self._epoch:
                if epoch in self._former_epochs:  # the former coordinator sent this frame before the switch
                    continue
                if self._epoch:
                    self._fail_all(started_again(self._where))
                    return
                self._epoch = epoch
            try:
                messages = unpack(frame[EPOCH_BYTES:])
            except WireError:
                continue
            for status, number, fields in messages:
                if status <= AnswerStatus.UNKNOWN:
                    call = self._calls.pop(number, None)
                    if call is not None:
                        if call.what == Op.JOIN:
                            self._inbox.restart()
                        call.fields = fields
                        call.answer = status
                        self._reader.wake_waiter(call)
                    elif (
                        status == AnswerStatus.UNKNOWN and self.member >= 0 and fields[1:] == [pack_number(self.member)]
                    ):
                        self.is_removed = True
                        self._expelled(fields[0])
                elif status == AnswerStatus.HEARTBEAT and fields:
                    self._beat_s = float(fields[0])
                elif status == AnswerStatus.PARKED and number in self._calls:
                    self._calls[number].is_parked = True
                elif status == AnswerStatus.CUT:
                    self._note(zmq.EVENT_DISCONNECTED)
                elif status == AnswerStatus.RESUMED:
                    self._note(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                elif status == AnswerStatus.EVENT:
                    self._inbox.receive(number, Event(fields[0].decode(), unpack_number(fields[1]), fields[2]))
                elif status == AnswerStatus.DATAGRAM:
                    self._inbox.put(Event("datagram", unpack_number(fields[0]), fields[1]))

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._was_connected:  # reconnected: messages in transit may have been lost
                for call in list(self._calls.values())[:_MAX_CALLS]:
                    call.num_sent = 0
                    self._transmit(call)
                self._send_heartbeat()  # TCP may have lost the last heartbeats
            self._was_connected, self._cut_at, self._refused_at = True, None, None
        elif event == zmq.EVENT_DISCONNECTED:
            if self._was_connected and self._cut_at is None:
                self._cut_at = time.monotonic()
        # a connection that was admitted before has the right key
        elif event != zmq.EVENT_CONNECTED and not self._was_connected:
            self._failed += 1
            now = time.monotonic()
            if self._failed == 1:
                self._failed_at = now
            if self._failed >= _HANDSHAKES and now - self._failed_at >= _HANDSHAKES_S:
                self._suspect = self._route

    def _diagnose(self, route: Route, limit_s: float) -> None:
        """Find out why no connection can be established, and fail all calls with the reason.

        The diagnosis may take seconds, so it runs without the lock.
        """
        error = explain_refusal(self.address, route, self.key, min(limit_s, _DIAGNOSIS_S))
        with self._lock:
            self._suspect, self._failed = None, 0
            if self._socket is not None:
                self._read()
                if error is not None and not self._was_connected:  # no connection has been established meanwhile
                    self._fail_all(error)

    def _expelled(self, why: bytes) -> None:
        self._inbox.put(Event("expelled", self.member, why))
        self._stop.set()
        self.member = -1

    def _finish(self, call: PendingCall, error: Exception) -> None:
        call.error = error
        self._calls.pop(call.number, None)
        self._reader.wake_waiter(call)

    def _fail_all(self, error: Exception) -> None:
        for call in list(self._calls.values()):
            self._finish(call, error)
        if self.member >= 0:
            self._expelled(str(error).encode())

    def _ring(self) -> None:
        if self._wakeup is not None:
            self._wakeup.ring()

    def _revive(self, deadline: Deadline) -> None:
        """Open a new connection in a forked child, which is not a member and has no pending requests."""
        self._reset()
        self.member = -1
        self._given_context = None
        try:
            self._connect(deadline)
        except BaseException:
            self._pid = -1  # the next call tries again
            raise


class CallSlots:
    """`CallSlots` is a semaphore with `size` slots, of which a caller can acquire several at once."""

    def __init__(self, size: int) -> None:
        self._num_free = size
        self._changed = threading.Condition(threading.Lock())

    def acquire(self, number: int, timeout_s: float) -> bool:
        """Wait until `number` slots are free, and acquire them all; return False after `timeout_s`.

        A waiting caller holds no slot, so two large requests cannot deadlock.
        """
        with self._changed:
            if self._num_free < number and not self._changed.wait_for(
                lambda: self._num_free >= number, min(timeout_s, threading.TIMEOUT_MAX)
            ):
                return False
            self._num_free -= number
            return True

    def release(self, number: int = 1) -> None:
        with self._changed:
            self._num_free += number
            self._changed.notify_all()


_EVENT_BYTES, _REPORT_BYTES = 100, 1 << 20


class EventInbox:
    """An `EventInbox` returns each event once and in order; its descriptor is readable while it has events.

    The connection's lock guards it.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._wakeup = Wakeup()
        self.last = 0  # the number of the last event received
        self.consumed = 0  # the number of the last event popped; the coordinator need keep only later ones
        self._unreported_bytes = 0  # the bytes popped since the last heartbeat

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events to pop."""
        return self._wakeup.fileno()

    def restart(self) -> None:
        """Restart the numbering, because this process has joined, perhaps not for the first time."""
        self.last = self.consumed = self._unreported_bytes = 0

    def receive(self, number: int, event: Event) -> None:
        """Add event `number` if it is the next; drop it if it is a duplicate, or if an earlier event is missing.

        After a gap, the coordinator sends the missing events and the dropped ones again.
        """
        if number == self.last + 1:
            self.last = number
            self.put(event)

    def put(self, event: Event) -> None:
        """Add an event without checking its number; datagrams and this process's own events have none."""
        self._events.append(event)
        self._wakeup.ring()

    def pop_all(self) -> list[Event]:
        """Return the events received since the last call."""
        events = list(self._events)
        self._events.clear()
        self.consumed = self.last
        self._wakeup.drain()
        self._unreported_bytes += sum(len(event.body) + _EVENT_BYTES for event in events)
        return events

    @property
    def is_overdue(self) -> bool:
        """Return whether to report `consumed` to the coordinator at once, since senders may be blocked."""
        return self._unreported_bytes > _REPORT_BYTES

    def note_reported(self) -> None:
        """Record that `consumed` was reported to the coordinator."""
        self._unreported_bytes = 0

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        self._wakeup.close()


# A `Reader` decides which of the threads that wait for answers reads the socket, for all of them.
#
#     call ──► send ──► does another thread read? ── no ──► read until my answer arrives, then wake another reader
#                                                 └─ yes ─► sleep until the reader wakes this thread
#
# If only one thread uses the connection, it reads its own answers, without a switch to another thread.

PollOnce = Callable[[float], None]
"""A function that waits for data up to the given number of seconds, and reads the data."""


class Reader:
    """A `Reader` lets one thread at a time read. `lock` guards `calls`, the unanswered calls by number."""

    def __init__(self, lock: threading.Lock, calls: Mapping[int, PendingCall]) -> None:
        self._lock = lock
        self._calls = calls
        self._thread: int | None = None  # the thread that reads
        self.turn = threading.Lock()  # held by that thread
        self.wakeup: Wakeup | None = None  # wakes the thread that reads
        self.is_closed = False

    def wait(self, call: PendingCall, deadline: Deadline, poll_once: PollOnce) -> None:
        """Read until the call is over or the deadline passes; if another thread is reading, sleep until it wakes us.

        After a sleep, the call may not be over; then call this again.
        """
        if not self.turn.acquire(blocking=False):
            wake = threading.Lock()
            wake.acquire()
            call.wake = wake
            if not self.turn.acquire(blocking=False):  # a reader that has just stopped did not see `call.wake`
                if not call.is_over:
                    wake.acquire(timeout=min(deadline.left_s, 0.5))
                call.wake = None
                return
            call.wake = None
        try:
            self._thread = threading.get_ident()
            while not call.is_over and not deadline.passed and not self.is_closed:
                poll_once(deadline.left_s)
        finally:
            self._thread = None
            self.turn.release()
            self._wake_next_reader()

    def try_read(self, call: PendingCall, poll_once: PollOnce) -> None:
        """Read the data that has arrived, unless the call is over or another thread is reading."""
        if not call.is_over and self.turn.acquire(blocking=False):
            try:
                poll_once(0.0)
            finally:
                self.turn.release()
                self._wake_next_reader()

    def read_for(self, limit_s: float, poll_once: PollOnce) -> None:
        """Wait at most `limit_s` for the turn to read, and at most `limit_s` more for data; read once."""
        if self.turn.acquire(timeout=limit_s):
            try:
                self._thread = threading.get_ident()
                poll_once(limit_s)
            finally:
                self._thread = None
                self.turn.release()

    def wake_waiter(self, call: PendingCall) -> None:
        """Wake the thread that waits for the call."""
        if call.wake is not None:
            _release(call.wake)
        elif self._thread is not None and self._thread != threading.get_ident() and self.wakeup is not None:
            self.wakeup.ring()

    def _wake_next_reader(self) -> None:
        """Wake a waiting thread, which takes over from the reader that stops."""
        with self._lock:
            for call in self._calls.values():
                if call.wake is not None:
                    _release(call.wake)
                    return


def _release(lock: threading.Lock) -> None:
    """Release `lock`, unless it is already released."""
    try:
        lock.release()
    except RuntimeError:  # already released
        pass


_FAILED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def explain_refusal(
    address: Address, route: Route, key: Key | None, timeout_s: float
) -> AuthenticationError | CoordinationError | None:
    """Connect once more, and return the reason for the refusal as an error; None if it is busy or silent."""
    assert key is not None
    answer, refuses = who_answers(route.address, timeout_s, lambda deadline: _hangs_up(route, key, deadline))
    if refuses:
        return AuthenticationError(
            f"the coordinator at {address} ({route.address}) does not accept this host's key (fingerprint "
            f"{key.fingerprint}): its own key differs.\nCompare with `phalanx key --fingerprint` on the coordinator's "
            "host, and copy the key from there."
        )
    if answer in ("", "coordinator"):
        return None
    return CoordinationError(
        f"there is no coordinator at {address} ({route.address}), but {answer}.\nCheck the port.", reason="stranger"
    )


def _hangs_up(route: Route, key: Key, deadline: Deadline) -> bool:
    """Return whether the coordinator closes a connection during a handshake with our key, before the deadline.

    The coordinator cannot report a wrong key: its answer would be encrypted for processes with its key.
    """
    with zmq.Context() as context, open_dealer(context, key) as dealer:
        dealer.reconnect_ivl = -1
        monitor = dealer.get_monitor_socket(EVENTS)
        dealer.connect(route.address.endpoint)
        try:
            while monitor.poll(int(deadline.left_s * 1000)):
                event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
                if event & _FAILED:
                    return True
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return False
        finally:
            dealer.disable_monitor()
            monitor.close(0)
    return False


def without_key(address: Address) -> AuthenticationError:
    """Return the error for a client that has no key."""
    return AuthenticationError(
        f"the coordinator at {address} accepts only clients that have the job's key, but there is no key here.\n"
        "Provide the key of the coordinator's host in a file (PHALANX_KEY_FILE, or ~/.config/phalanx/key) or in "
        "PHALANX_KEY."
    )


def unreachable(address: Address, tried: NoRouteError) -> CoordinationError:
    """Return the error for an address at which this host cannot reach a coordinator."""
    return CoordinationError(
        f"the coordinator at {address} cannot be reached from {os.uname().nodename}. Tried {tried}.\n"
        "Check that the coordinator runs there, that this host has a route to it, and that no firewall blocks it.",
        reason="unreachable",
    )


def cut_off(where: str, for_s: float) -> CoordinationError:
    """Return the error for a connection that was cut and could not be restored."""
    return CoordinationError(
        f"{where} can no longer be reached: the connection was cut {for_s:.0f} s ago, and nothing answers there.\n"
        "Either the coordinator has ended (read the output of its host first), or the network between the hosts is "
        "down.",
        reason="lost",
    )


def started_again(where: str) -> CoordinationError:
    """Return the error for a coordinator that was restarted and no longer has the job's state."""
    return CoordinationError(
        f"{where} was restarted, so the job's keys, members and queues are lost.\nStart the job again.",
        reason="lost",
    )


def ended(where: str) -> CoordinationError:
    """Return the error for a coordinator that has ended while its host still runs."""
    return CoordinationError(
        f"{where} has ended: its host answers, but nothing listens there any longer", reason="lost"
    )


def late(where: str, timeout_s: float, keys: Sequence[str], silent_s: float, *, is_cut: bool) -> DeadlineError:
    """Return the error for an unanswered request: `keys` are missing, or the coordinator is silent."""
    if keys and silent_s < COORDINATOR_SILENT_S and not is_cut:
        shown = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
        return DeadlineError(f"wait timeout after {timeout_s * 1000:.0f}ms, keys: {shown}")
    return DeadlineError(
        f"{where} did not answer within {timeout_s:.1f} s; it last answered {silent_s:.1f} s ago"
        f"{', and the connection is cut' if is_cut else ''}."
    )
