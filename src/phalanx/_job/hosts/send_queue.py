"""A `SendQueue` holds what an agent has to send through the coordinator, in order, and decides what travels together.

    put ──▶ A1 A2 B1 C1 │ key │ A3      take_batch ──▶ A1+A2, B1, C1 ──▶ settle: B's outbox was full ──▶ B1 │ key │ A3

What is for one member arrives in the order in which it was put. It has no lock and no thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from phalanx._comm.control.wire import MAX_MESSAGES

ALL = -1  # in place of a member: all others
KEY = -2  # in place of a member: the bytes are a key and its value
_MAX_LINES, _MAX_LINES_BYTES = 64, 1 << 18  # so much to one member is one message
_MAX_BATCH_BYTES = 1 << 20  # of all messages that travel together


class Entry(NamedTuple):
    """An `Entry` is `data` that is to be sent to `member`; without data that member is to be expelled."""

    member: int
    data: bytes

    @property
    def is_alone(self) -> bool:
        """Return whether it travels alone, after all that was put before it."""
        return self.member < 0 or not self.data


class SendQueue:
    """A `SendQueue` is the queue of one agent; `num_bytes` is how much has not been sent yet."""

    def __init__(self) -> None:
        self._waiting: deque[Entry] = deque()
        self._sending: list[Entry] = []  # those of the batch that is under way
        self._full: frozenset[int] = frozenset()  # the members that had no room for the last batch
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def unsent(self) -> list[Entry]:
        """Return all that has not been sent, with what is under way."""
        return [*self._sending, *self._waiting]

    def put(self, member: int, data: bytes) -> None:
        self._waiting.append(Entry(member, data))
        self.num_bytes += len(data)

    def take_batch(self) -> list[Entry]:
        """Return what is to be sent next: one entry that travels alone, or one message for each of several members.

        A message has the lines that stand for its member in a row. The batch ends before a member's second message,
        unless that member's outbox was full: then the second one stays, and those of others go past it.
        """
        lines: dict[int, list[bytes]] = {}
        passed: list[Entry] = []
        passed_members: set[int] = set()
        num_bytes = 0
        while self._waiting and not (lines and self._waiting[0].is_alone):
            entry = self._waiting[0]
            if entry.member in passed_members or (lines and not self._fits(entry, lines, num_bytes)):
                if entry.member not in lines or entry.member not in self._full:
                    break
                passed_members.add(entry.member)
                passed.append(self._waiting.popleft())
                continue
            lines.setdefault(entry.member, []).append(entry.data)
            num_bytes += len(entry.data)
            self._sending.append(self._waiting.popleft())
            if entry.is_alone:
                break
        self._waiting.extendleft(reversed(passed))
        return [Entry(member, b"\n".join(parts)) for member, parts in lines.items()]

    def _fits(self, entry: Entry, lines: dict[int, list[bytes]], num_bytes: int) -> bool:
        """Return whether the entry can be a message of this batch, or continue the one that was begun last."""
        if num_bytes + len(entry.data) > _MAX_BATCH_BYTES:
            return False
        if entry.member not in lines:
            return len(lines) < MAX_MESSAGES
        parts = lines[entry.member]
        is_next = self._sending[-1].member == entry.member
        return is_next and len(parts) < _MAX_LINES and sum(map(len, parts)) + len(entry.data) <= _MAX_LINES_BYTES

    def settle(self, full: Collection[int] = ()) -> None:
        """Note that the batch was sent, except to the members whose outboxes were `full`: that is sent again, first."""
        self.num_bytes -= sum(len(entry.data) for entry in self._sending if entry.member not in full)
        self._sending = [entry for entry in self._sending if entry.member in full]
        self.take_back_batch()
        self._full = frozenset(full)

    def take_back_batch(self) -> None:
        """Put the batch back in front, as nobody knows whether it was sent."""
        self._waiting.extendleft(reversed(self._sending))
        self._sending = []

    def drop(self) -> None:
        """Drop all that is not under way."""
        self.num_bytes -= sum(len(entry.data) for entry in self._waiting)
        self._waiting.clear()

    def replace(self, entries: Collection[Entry]) -> None:
        """Hold these entries, and nothing else."""
        self._sending = []
        self._waiting = deque(entries)
        self.num_bytes = sum(len(entry.data) for entry in entries)
