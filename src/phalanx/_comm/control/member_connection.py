"""A `MemberConnection` makes a process a member of the job: it sends heartbeats, and receives membership events.

Its own thread sends the heartbeats, and reads while no other thread does, so that events arrive even without requests.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from phalanx._base.loss_detection import COORDINATOR_REFUSED_S
from phalanx._comm.control.address import Address
from phalanx._comm.control.connection import Connection, Timeout, ended
from phalanx._comm.control.event import Event
from phalanx._comm.control.route import is_refused
from phalanx._comm.control.wire import Op, pack, pack_number

_REFUSED_EVERY_S, _PROBE_S = 0.25, 0.3
_STOPPED_S = 1.0  # a heartbeat this late means that the whole process, or its machine, was stopped


class MemberConnection(Connection):
    """A `MemberConnection` is a `Connection` whose process may join the job. It takes the same arguments."""

    is_served: Callable[[], bool] | None = None
    """Returns whether this process itself serves as the coordinator; if so, silence is not reported."""

    def join(self, facts: Mapping[str, Any], *, watch: Collection[int] | None = None) -> int:
        """Become a member, and return its number; from now on, receive the joins, departures and losses of members.

        `watch` limits these events to the given members. `facts` are published to the other members as a JSON object of
        up to 64 KiB; messages to users name this member by its fact "host".

        Raises:
            ValueError: this client is a member already, or the coordinator refuses the facts.
        """
        if self.member >= 0:
            raise ValueError(f"this client is member {self.member} already")
        body = json.dumps(dict(facts)).encode()
        if self._thread is not None:  # the thread belongs to an earlier membership
            self._stop.set()
            self._ring()
            self._thread.join()
        self._stop.clear()
        watched = b"all" if watch is None else b",".join(map(pack_number, watch))
        self.member = int(self._call(Op.JOIN, body, watched)[0])
        self.is_removed = False
        self._start_heartbeats()
        return self.member

    def _start_heartbeats(self) -> None:
        self._is_silent = False
        self._thread = threading.Thread(target=self._run_heartbeats, name="phalanx-heartbeat", daemon=True)
        self._thread.start()

    def follow_member(self, member: int, address: Address, epoch: bytes, timeout: Timeout = None) -> None:
        """Continue as `member` at the standby that has taken over. This raises the same errors as `redirect`."""
        self._stop.set()
        self._ring()
        if self._thread is not None:
            self._thread.join()
        self.redirect(address, epoch, timeout)
        # messages from the former coordinator no longer apply, for example that this process was lost
        self._stop.clear()
        self.is_removed = False
        self.member = member
        self._start_heartbeats()

    def send_datagram(self, to: int, body: bytes) -> None:
        """Send an unreliable message to a member, without waiting; the message may be lost."""
        with self._lock:
            if self._socket is not None:
                self._transmit_raw(pack(Op.DATAGRAM, 0, pack_number(to), body))
                self._read()

    def leave(self, why: str = "it has finished") -> None:
        """Leave the job; the other members are notified of the reason."""
        self._stop.set()
        self._ring()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.member >= 0:
            try:
                self._call(Op.LEAVE, pack_number(-1), why.encode())
            finally:
                self.member = -1
                self._stop.clear()

    def is_over(self) -> bool:
        """Return whether the coordinator has ended: its port is closed, or its local socket is gone. This is slow."""
        if self._route is not None:
            return is_refused(self._route.address, _PROBE_S)
        return not os.path.exists(self.address.path)

    # Events.

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events to receive."""
        return self._inbox.fileno()

    def receive_events(self) -> list[Event]:
        """Return the events received since the last call, without waiting; they will not be sent again."""
        with self._lock:
            events = self._inbox.pop_all()
            if self._inbox.is_overdue and self._socket is not None:
                self._send_heartbeat()
                self._read()
        return events

    def wait_event(self, timeout: Timeout = None) -> list[Event]:
        """Wait for an event, and return the events received since the last call, or an empty list after `timeout`."""
        deadline = self._deadline(timeout)
        poll = select.poll()  # select() refuses descriptors above 1,023
        poll.register(self.fileno(), select.POLLIN)
        while True:
            if events := self.receive_events():
                return events
            if deadline.passed:
                return []
            poll.poll(min(deadline.left_s, 3600.0) * 1000 + 1)

    # The member's thread.

    def _run_heartbeats(self) -> None:
        next_at = time.monotonic()
        while not self._stop.is_set():
            now = time.monotonic()
            if now >= next_at:
                with self._lock:
                    if now - next_at > _STOPPED_S:  # this process was stopped, and could not receive
                        self._received_at = min(now, self._received_at + now - next_at)
                    self._send_heartbeat()
                    self._read()
                    self._check_silence(now)
                next_at = now + self._beat_s
            left_s = max(0.0, next_at - time.monotonic())
            if self._cut_at is not None:
                self._check_end(self._cut_at)
                left_s = min(left_s, _REFUSED_EVERY_S)
            self._reader.read_for(left_s, self._poll_once)

    def _check_silence(self, now: float) -> None:
        """Report once when the coordinator becomes silent, and once when it is back."""
        silent_s = now - self._received_at
        is_served = self.is_served is not None and self.is_served()
        if silent_s > self._lost_after_s and not self._is_silent and not is_served:
            self._is_silent = True
            self._inbox.put(Event("unreachable", -1, f"it has sent nothing for {silent_s:.1f} s".encode()))
        elif silent_s <= self._lost_after_s and self._is_silent:
            self._is_silent = False
            self._inbox.put(Event("reachable"))

    def _check_end(self, cut_at: float) -> None:
        """Fail all calls if the coordinator has ended, that is, its host answers but its port has stayed closed.

        A host that is switched off, or a cut link, gives no answer; only the silence reveals it.
        """
        is_over = self.is_over()
        now = time.monotonic()
        self._refused_at = (self._refused_at or now) if is_over else None
        if self._refused_at is not None and now - self._refused_at >= COORDINATOR_REFUSED_S:
            with self._lock:
                if self._socket is not None:
                    self._read()
                    if self._cut_at == cut_at:
                        self._fail_all(ended(self._where))
