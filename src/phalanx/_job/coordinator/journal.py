"""A `Journal` records the changes of a coordinator's state, in order: a copy that replays them has the same state.

    request ──► the coordinator executes it ──► entry ──► replay, on another host

Only changes are entries, and only those that do not follow from earlier entries: a granted request, with all its
consequences, is one entry. A request is not an entry if its only effect is an answer, or if the client repeats it when
unanswered (a waiting `get`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

from phalanx._comm.control.wire import WireError, pack, unpack
from phalanx._job.coordinator.session import DirectRoute, RelayedRoute, Route


class EntryKind(enum.IntEnum):
    """An `EntryKind` is the kind of a journal entry."""

    # A snapshot, part by part.
    BEGIN = 1  # the copy discards its state: epoch, job, limits; `number`: that of the next member
    KEYS = 2  # keys with their values
    QUEUE = 3  # the name of a queue, and items to append to it
    GONE = 4  # why member `number` has left
    MEMBER = 5  # member `number`: facts, whom it watches, the number of its last event
    EVENT = 6  # an event that member `number` has not acknowledged: its number, and the event
    SESSION = 8  # a client, and why it is no longer a member
    ANSWERS = 9  # numbers of requests, with their answers
    POPPED = 10  # request `number` has popped an item: the queue, and the item
    PARKED = 11  # request `number` waits at a barrier: its fields
    OPENED = 12  # a relay, which member `number` owns
    SUSPECTED = 13  # member `number` is suspected to be lost: why; its watchers were notified

    # A change of the state.
    REQUEST = 20  # request `number` was granted: its operation and fields
    UNPOP = 21  # the item that request `number` popped is back in its queue
    UNPARK = 22  # request `number` no longer waits at a barrier
    LOSE = 23  # member `number` is lost: why
    ACKNOWLEDGED = 24  # members, with the number of the last event that each has acknowledged
    FORGET = 25  # a client is forgotten
    SUSPECT = 26  # member `number` is suspected to be lost: why; notify its watchers


class JournalEntry(NamedTuple):
    """A `JournalEntry` is one change. `route` leads to the client that the entry is about, if any."""

    kind: int
    route: Route | None
    number: int
    fields: list[bytes]


class Journal:
    """A `Journal` keeps entries while `is_kept` is set."""

    def __init__(self) -> None:
        self.is_kept = False
        self._entries: list[JournalEntry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, kind: EntryKind, route: Route | None, number: int, *fields: bytes, at: int | None = None) -> None:
        """Add a change; `at` is its position if entries that follow from it are already recorded."""
        if self.is_kept:
            self._entries.insert(
                len(self._entries) if at is None else at, JournalEntry(kind, route, number, list(fields))
            )

    def stop(self) -> None:
        """Stop recording and drop all entries, because no standby follows any longer."""
        self.is_kept = False
        self._entries = []

    def drain(self) -> list[JournalEntry]:
        """Return and remove the entries since the last call."""
        entries, self._entries = self._entries, []
        return entries


def pack_entry(entry: JournalEntry) -> bytes:
    """Return an entry as a message; a frame is a sequence of messages."""
    return pack(entry.kind, entry.number, pack_route(entry.route), *entry.fields)


def unpack_entries(frame: bytes) -> Iterable[JournalEntry]:
    """Yield the entries of a frame.

    Raises:
        WireError: the frame does not consist of entries.
    """
    for kind, number, fields in unpack(frame):
        if not fields:
            raise WireError("an entry without a route")
        yield JournalEntry(kind, unpack_route(fields[0]), number, fields[1:])


def pack_route(route: Route | None) -> bytes:
    """Return a route as a field."""
    if route is None:
        return b""
    direct, behind = (route.relay, route.route) if isinstance(route, RelayedRoute) else (route, None)
    head = bytes((2 * direct.listener + (behind is not None), len(direct.identity)))
    return head + direct.identity + (behind or b"")


def unpack_route(field: bytes) -> Route | None:
    """Return the route in a field.

    Raises:
        WireError: the field is not a route.
    """
    if not field:
        return None
    if len(field) < 2 or len(field) < 2 + field[1] or field[0] > 3:
        raise WireError("not a route")
    end = 2 + field[1]
    direct = DirectRoute(field[0] // 2, field[2:end])
    if field[0] % 2:
        return RelayedRoute(direct, field[end:])
    if len(field) > end:
        raise WireError("not a route")
    return direct
