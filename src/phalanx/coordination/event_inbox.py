"""An `EventInbox` keeps the events that the coordinator has sent to this member until they are taken."""

from __future__ import annotations

from collections import deque

from phalanx.coordination.event import Event
from phalanx.ipc.wakeup import Wakeup

_EVENT_BYTES, _TELL_BYTES = 100, 1 << 20


class EventInbox:
    """Each event once and in order, with a descriptor that is readable while there are some.

    Not for several threads at once: the connection's lock guards it.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._wakeup = Wakeup()
        self.last = 0  # the number of the last event that has come
        self.taken = 0  # and of the last one that was taken: the coordinator need not keep it
        self._untold_bytes = 0  # of what was taken since the coordinator was told

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events to take."""
        return self._wakeup.fileno()

    def restart(self) -> None:
        """Begin to count anew: this process has joined (again)."""
        self.last = self.taken = self._untold_bytes = 0

    def receive(self, number: int, event: Event) -> None:
        """Event `number` has come. One that was sent twice, or before one that is missing, is sent again: dropped."""
        if number == self.last + 1:
            self.last = number
            self.put(event)

    def put(self, event: Event) -> None:
        """Add an event of our own, which has no number."""
        self._events.append(event)
        self._wakeup.ring()

    def take(self) -> list[Event]:
        """Return what has come since the last call."""
        events = list(self._events)
        self._events.clear()
        self.taken = self.last
        self._wakeup.drain()
        self._untold_bytes += sum(len(event.body) + _EVENT_BYTES for event in events)
        return events

    @property
    def is_overdue(self) -> bool:
        """Whether so much was taken that the coordinator should hear it at once: senders may be waiting for us."""
        return self._untold_bytes > _TELL_BYTES

    def told(self) -> None:
        """Note that the coordinator has been sent `taken`."""
        self._untold_bytes = 0

    def close(self) -> None:
        """Let go of the descriptor; a second call does nothing."""
        self._wakeup.close()
