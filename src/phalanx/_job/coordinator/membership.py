"""`Membership` tracks the members of a job, the reasons why former members left, and each member's unread events.

Every member has an outbox: numbered events that are kept until the member acknowledges them, so that a network
interruption loses none. An outbox has a limit; a sender to a member with a full outbox has to try again. `Membership`
uses no clock and no network.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from phalanx._comm.control.wire import AnswerStatus, pack, pack_number, unpack, unpack_number

MAX_FACTS_BYTES = 64 << 10
MAX_MEMBERS = 1 << 16
OUTBOX_BYTES = 8 << 20
_GONE_KEPT = 4096  # number of former members whose reason for leaving is kept
_OVERHEAD_BYTES = 100


@dataclass(eq=False)
class Member:
    """A `Member` is a process that has joined. `received_at` is when its last message arrived.

    `watches` are the members of whose joins and leaves this member is notified; None stands for all.
    """

    id: int
    owner: object
    facts: bytes
    watches: frozenset[int] | None
    received_at: float
    _outbox: deque[tuple[int, bytes]] = field(default_factory=deque)
    _last: int = 0
    _sent: int = 0
    _acknowledged: int = 0
    _copied: int = 0  # the number of the last event that copies know to be acknowledged
    suspicion: str = ""  # why the member is suspected to be lost, until that is confirmed
    num_bytes: int = 0

    def has_room(self, size: int) -> bool:
        """Return whether an event of `size` bytes fits in the outbox; an empty outbox accepts any size."""
        return not self._outbox or self.num_bytes + size <= OUTBOX_BYTES

    def put(self, kind: bytes, member: int, detail: bytes) -> None:
        """Put an event into this member's outbox."""
        self._last += 1
        event = pack(AnswerStatus.EVENT, self._last, kind, pack_number(member), detail)
        self._outbox.append((self._last, event))
        self.num_bytes += len(event) + _OVERHEAD_BYTES

    def acknowledge(self, number: int) -> None:
        """Remove the events up to `number`, which the member has received, from the outbox."""
        self._acknowledged = max(self._acknowledged, min(number, self._last))
        while self._outbox and self._outbox[0][0] <= number:
            self.num_bytes -= len(self._outbox.popleft()[1]) + _OVERHEAD_BYTES

    def unsent(self) -> Iterator[bytes]:
        """Yield the events that have not been sent since the last `rewind`, and mark them as sent."""
        if not self._outbox or self._sent == self._last:
            return
        start = max(0, self._sent + 1 - self._outbox[0][0])
        for at in range(start, len(self._outbox)):
            yield self._outbox[at][1]
        self._sent = self._last

    def rewind(self, number: int) -> None:
        """Mark the events after `number` as not sent, so that they are sent again."""
        self._sent = min(self._sent, max(number, 0))

    @property
    def sent(self) -> int:
        """Return the number of the last event that was sent."""
        return self._sent

    @property
    def last(self) -> int:
        return self._last

    def waiting(self) -> list[tuple[int, bytes]]:
        """Return the events that the member has not acknowledged, with their numbers."""
        return list(self._outbox)

    def unread_messages(self) -> list[tuple[int, bytes]]:
        """Return the messages that the member has not acknowledged, each after its sender's number."""
        events = (unpack(event)[0].fields for _, event in self._outbox)
        return [(unpack_number(sender), detail) for kind, sender, detail in events if kind == b"message"]

    def restore_last(self, number: int) -> None:
        """Restore the number of the last event; the member has acknowledged the events up to this number."""
        self._last = self._acknowledged = self._copied = number

    def restore_event(self, number: int, event: bytes) -> None:
        """Restore an unacknowledged event; the caller restores the oldest one first."""
        self._acknowledged = self._copied = min(self._acknowledged, number - 1)
        self._outbox.append((number, event))
        self.num_bytes += len(event) + _OVERHEAD_BYTES

    def pop_progress(self) -> int | None:
        """Return the number of the last acknowledged event, unless an earlier call has returned it."""
        if self._copied == self._acknowledged:
            return None
        self._copied = self._acknowledged
        return self._acknowledged


class Membership:
    """`Membership` holds the members of a job, by the number that each got when it joined."""

    def __init__(self, lost_after_s: float) -> None:
        self.lost_after_s = lost_after_s
        self._members: dict[int, Member] = {}
        self._watchers: dict[int | None, set[int]] = {}  # by the member that is watched; None: those that watch all
        self._gone: dict[int, str] = {}
        self._next = 0
        self._notified: list[Member] = []
        self._by_silence: OrderedDict[int, None] = OrderedDict()  # the members, ordered by their latest message
        self._grown: set[int] = set()  # members whose outboxes have grown since the last `pop_grown`
        self._own: set[int] = set()  # members in the coordinator's own process
        self._suspects: set[int] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def get(self, member: int) -> Member | None:
        """Return the member with this number; None if it is not in the job now."""
        return self._members.get(member)

    def find_leave_reason(self, member: int) -> str:
        """Return why a member has left; empty if the member is unknown, or left long ago."""
        return self._gone.get(member, "")

    def join(self, owner: object, facts: bytes, watches: frozenset[int] | None, now: float) -> Member:
        """Add and return a new member; the members that watch it receive its facts."""
        member = Member(self._next, owner, facts, watches, now)
        self._next += 1
        self._notify_watchers(b"joined", member.id, facts)
        self._members[member.id] = member
        self._add_watches(member)
        self._by_silence[member.id] = None
        return member

    def record_message(self, member: Member, now: float) -> None:
        member.received_at = now
        if member.id in self._by_silence:
            self._by_silence.move_to_end(member.id)

    def suspect(self, member: Member, why: str) -> None:
        """Notify the watchers of a member that it is lost, and keep the member until the loss is confirmed."""
        member.suspicion = why
        self._suspects.add(member.id)
        self._notify_watchers(b"lost", member.id, why.encode())

    @property
    def suspects(self) -> list[Member]:
        """Return the members that are suspected to be lost. This costs nothing while there are none."""
        return [self._members[number] for number in sorted(self._suspects)]

    def restore_suspicion(self, member: Member, why: str) -> None:
        """Restore the suspicion of a member without notifying its watchers again; "" ends the suspicion."""
        member.suspicion = why
        (self._suspects.add if why else self._suspects.discard)(member.id)

    def remove(self, member: Member, kind: bytes, why: str) -> None:
        """Remove a member that has `left` or is `lost`; notify its watchers, unless `suspect` has notified them."""
        self._remove_watches(member)
        del self._members[member.id]
        del self._by_silence[member.id]
        self._suspects.discard(member.id)
        self._gone[member.id] = why
        if len(self._gone) > _GONE_KEPT:
            del self._gone[next(iter(self._gone))]
        if not member.suspicion:
            self._notify_watchers(kind, member.id, why.encode())

    @property
    def next(self) -> int:
        """Return the number of the next member that joins."""
        return self._next

    @property
    def gone(self) -> Mapping[int, str]:
        """Return why members have left, by number."""
        return self._gone

    def restore_next(self, number: int) -> None:
        """Restore the number of the next member that joins."""
        self._next = number

    def restore_leave_reason(self, member: int, why: str) -> None:
        self._gone[member] = why

    def restore(self, member: Member, last: int) -> Member:
        """Restore a member of another `Membership`; `last` is the number of its last event."""
        self._members[member.id] = member
        self._add_watches(member)
        self._by_silence[member.id] = None
        self._grown.add(member.id)
        member.restore_last(last)
        return member

    def pop_progress(self) -> list[int]:
        """Return each member that has acknowledged events since the last call, followed by the last event's number."""
        found = []
        for member in self._members.values():
            acknowledged = member.pop_progress()
            if acknowledged is not None:
                found += [member.id, acknowledged]
        return found

    def silent(self, now: float) -> list[Member]:
        """Return the members that have been silent for too long. This costs nothing while there are none."""
        found = []
        for number in self._by_silence:
            member = self._members[number]
            if now - member.received_at <= self.lost_after_s:
                break
            if number not in self._own and not member.suspicion:
                found.append(member)
        return found

    def exempt(self, member: int) -> None:
        """Never count a member as silent, because it is in the coordinator's own process."""
        self._own.add(member)

    def pop_grown(self) -> list[Member]:
        """Return the members whose outboxes have grown since the last call."""
        grown, self._grown = self._grown, set()
        return [self._members[number] for number in grown if number in self._members]

    def note_pause(self, pause_s: float, now: float) -> None:
        """Extend all deadlines by a pause in which the coordinator received nothing."""
        for member in self:
            member.received_at = min(now, member.received_at + pause_s)

    def post(self, sender: int, to: Member, detail: bytes) -> None:
        to.put(b"message", sender, detail)
        self._grown.add(to.id)

    def watch(self, member: Member, watches: frozenset[int] | None) -> None:
        """Notify `member` of joins and leaves of the members `watches` from now on; None stands for all members."""
        self._remove_watches(member)
        member.watches = watches
        self._add_watches(member)

    def _add_watches(self, member: Member) -> None:
        for watched in (None,) if member.watches is None else member.watches:
            self._watchers.setdefault(watched, set()).add(member.id)

    def _remove_watches(self, member: Member) -> None:
        for watched in (None,) if member.watches is None else member.watches:
            watchers = self._watchers[watched]
            watchers.remove(member.id)
            if not watchers:
                del self._watchers[watched]

    def _notify_watchers(self, kind: bytes, member: int, detail: bytes) -> None:
        """Notify a member's watchers of its change; even with thousands of members, each has few watchers."""
        for number in sorted(self._watchers.get(None, set()) | self._watchers.get(member, set())):
            other = self._members[number]
            other.put(kind, member, detail)
            self._grown.add(number)
            self._notified.append(other)

    def pop_notified(self) -> list[Member]:
        """Return the members that were notified of a change since the last call."""
        notified, self._notified = self._notified, []
        return notified
