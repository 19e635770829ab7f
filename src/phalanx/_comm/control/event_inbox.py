"""An `EventInbox` keeps the events that the coordinator has sent to this member until they are taken."""

from __future__ import annotations

from collections import deque

from phalanx._base.ipc.wakeup import Wakeup
from phalanx._comm.control.event import Event

_EVENT_BYTES, _TELL_BYTES = 100, 1 << 20


class EventInbox:
    """An `EventInbox` returns each event once and in order, and has a descriptor that is readable while there are some.

    Several threads must not use it at once: the connection's lock guards it.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._wakeup = Wakeup()
        self.last = 0  # the number of the last event that has come
        self.taken = 0  # the number of the last event that was taken, which the coordinator need not keep
        self._untold_bytes = 0  # how much was taken since the coordinator was last told

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are events to take."""
        return self._wakeup.fileno()

    def restart(self) -> None:
        """Start counting again: this process has joined, perhaps for the second time."""
        self.last = self.taken = self._untold_bytes = 0

    def receive(self, number: int, event: Event) -> None:
        """Keep event `number` if it is the next one. One that was sent twice is dropped, and so is one before which
        another is missing: it is sent again.
        """
        if number == self.last + 1:
            self.last = number
            self.put(event)

    def put(self, event: Event) -> None:
        """Add an event of our own, which has no number."""
        self._events.append(event)
        self._wakeup.ring()

    def take(self) -> list[Event]:
        """Return the events that have come since the last call."""
        events = list(self._events)
        self._events.clear()
        self.taken = self.last
        self._wakeup.drain()
        self._untold_bytes += sum(len(event.body) + _EVENT_BYTES for event in events)
        return events

    @property
    def is_overdue(self) -> bool:
        """Return whether the coordinator should hear it at once, since senders may be waiting for us."""
        return self._untold_bytes > _TELL_BYTES

    def told(self) -> None:
        """Note that the coordinator was told the value of `taken`."""
        self._untold_bytes = 0

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        self._wakeup.close()
