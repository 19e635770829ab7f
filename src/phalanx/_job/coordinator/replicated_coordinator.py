"""Copy a coordinator's state to other hosts, as journal entries; a copy replays them, and can take over.

primary ── snapshot ──► entries ──► replay ── copy
   │                                             │
   └── journal.drain, as it changes ──► replay ───┘── take_over: it is the primary now
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from phalanx._base.loss_detection import MEMBER_TIMEOUT_S
from phalanx._comm.control.wire import AnswerStatus, Op, WireError, WireMessage, pack, pack_number, unpack_number
from phalanx._job.coordinator.coordinator import Coordinator
from phalanx._job.coordinator.followers import Followers
from phalanx._job.coordinator.journal import EntryKind, JournalEntry
from phalanx._job.coordinator.key_value import KeyValueStore, Waiter
from phalanx._job.coordinator.membership import Member, Membership
from phalanx._job.coordinator.session import Answer, ClientSession, Route
from phalanx._job.coordinator.store_requests import barrier_key

# the limits of one part of a state, unless it is a single item
_ENTRY_BYTES, _ENTRY_FIELDS = 1 << 20, 1 << 10


class ReplicatedCoordinator(Coordinator):
    """A coordinator that can be copied, and can be a copy."""

    def __init__(self, *, job: str = "", lost_after_s: float = MEMBER_TIMEOUT_S, max_bytes: int = 1 << 30) -> None:
        super().__init__(job=job, lost_after_s=lost_after_s, max_bytes=max_bytes)
        self.followers = Followers()
        self._datagrams: list[tuple[ClientSession, list[Answer]]] = []
        self._handlers |= {Op.FOLLOW: self._follow, Op.FOLLOWED: self._followed, Op.DATAGRAM: self._datagram}

    # Standbys on other hosts.

    def pop_outgoing(self) -> Iterator[tuple[ClientSession, list[Answer]]]:
        """Yield the answers that may be sent, by session; others wait until the required standbys have acknowledged."""
        datagrams, self._datagrams = self._datagrams, []
        yield from datagrams
        followers = self.followers
        if not followers.is_active:
            yield from super().pop_outgoing()
            return
        self._cut()
        yield from followers.release()
        for session, answers in super().pop_outgoing():
            if not followers.delay(session, answers):
                yield session, answers

    def _cut(self) -> None:
        """Send the changes since the last call to the standbys."""
        for session, messages in self.followers.cut(self.journal.drain()):
            for message in messages:
                self._send(session, message)

    def undelivered(self, session: ClientSession, answers: Iterable[Answer]) -> None:
        if self.followers.lose(session) and not self.followers.is_followed:
            self.journal.stop()
        super().undelivered(session, answers)

    def tick(self, now: float) -> list[str]:
        """Do what `Coordinator.tick` does; also report standbys that are late."""
        self.followers.check(now)
        return super().tick(now)

    def _must_be_confirmed(self, member: Member) -> bool:
        """Return whether another member must confirm the loss of this one.

        Otherwise the standbys of an isolated coordinator would lose all members, including themselves.
        """
        return member.id in self.followers.confirmed_members and member.id != self.followers.leader

    def _follow(self, session: ClientSession, message: WireMessage) -> None:
        (ticket,) = message.fields
        self._cut()  # the changes so far are in the state already
        self.journal.is_kept = True
        for part in self.followers.begin(ticket, session, self.snapshot()):
            self._send(session, part)

    def _followed(self, session: ClientSession, message: WireMessage) -> None:
        ticket, batch = message.fields
        self.followers.acknowledge(ticket, session, unpack_number(batch))

    def _datagram(self, session: ClientSession, message: WireMessage) -> None:
        to, body = message.fields
        receiver = self.members.get(unpack_number(to))
        if session.member is not None and receiver is not None:
            assert isinstance(receiver.owner, ClientSession)
            datagram = pack(AnswerStatus.DATAGRAM, 0, pack_number(session.member.id), body)
            self._datagrams.append((receiver.owner, [datagram]))

    # The complete state, and its changes.

    def snapshot(self) -> list[JournalEntry]:
        """Return the whole state. A copy that replays it, and then the journal, becomes equal to this coordinator."""
        return list(self._describe_state())

    def replay(self, entry: JournalEntry, now: float) -> None:
        """Apply a change of the coordinator that this one copies; it has all earlier entries.

        Raises:
            WireError: the entry is malformed.
        """
        self.is_copy = True
        kind, route, number, fields = entry
        try:
            if kind == EntryKind.BEGIN:
                self._begin(number, *fields)
            elif route is not None:
                self._replay_of_session(kind, self._find_session(route, now), number, fields, now)
            else:
                self._replay_of_all(kind, number, fields)
        except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            raise WireError(f"an entry of kind {kind}: {error!r}") from None

    def take_over(self, now: float) -> None:
        """Become the coordinator: all results that were granted to clients are valid here.

        This coordinator has received no message from clients yet, so no client counts as silent.
        """
        self.is_copy = False
        self.outgoing.clear()
        for session in self.sessions.values():
            session.received_at = now
        for member in self.members:
            member.received_at = now
            self.members.restore_suspicion(member, "")  # this coordinator decides on its own
            member.rewind(0)
        self.members.pop_notified()

    def _find_session(self, route: Route, now: float) -> ClientSession:
        session = self.sessions.get(route)
        if session is None:
            session = self.sessions[route] = ClientSession(route, now)
        return session

    # The state.

    def _describe_state(self) -> Iterator[JournalEntry]:
        yield JournalEntry(
            EntryKind.BEGIN,
            None,
            self.members.next,
            [
                self.epoch,
                self.job.encode(),
                repr(self.members.lost_after_s).encode(),
                pack_number(self.store.max_bytes),
            ],
        )
        keys = self.store.keys()
        for fields in _grouped((key, self.store.get(key) or b"") for key in keys):
            yield JournalEntry(EntryKind.KEYS, None, 0, fields)
        for queue, items in self.store.queues():
            for fields in _grouped((item,) for item in items):
                yield JournalEntry(EntryKind.QUEUE, None, 0, [queue, *fields])
        for member, why in self.members.gone.items():
            yield JournalEntry(EntryKind.GONE, None, member, [why.encode()])
        for session in self.sessions.values():
            yield from _describe_session(session)
        for each in self.members:
            watches = b"all" if each.watches is None else b",".join(map(pack_number, sorted(each.watches)))
            assert isinstance(each.owner, ClientSession)
            yield JournalEntry(
                EntryKind.MEMBER, each.owner.route, each.id, [each.facts, watches, pack_number(each.last)]
            )
            for number, event in each.waiting():
                yield JournalEntry(EntryKind.EVENT, None, each.id, [pack_number(number), event])
            if each.suspicion:
                yield JournalEntry(EntryKind.SUSPECTED, None, each.id, [each.suspicion.encode()])

    def _begin(self, next_member: int, epoch: bytes, job: bytes, lost_after: bytes, max_bytes: bytes) -> None:
        self.epoch, self.job = epoch, job.decode()
        self.store = KeyValueStore(unpack_number(max_bytes))
        self.members = Membership(float(lost_after))
        self.members.restore_next(next_member)
        self.sessions.clear()
        self.outgoing.clear()

    def _replay_of_all(self, kind: int, number: int, fields: Sequence[bytes]) -> None:
        if kind == EntryKind.KEYS:
            for key, value in zip(fields[::2], fields[1::2], strict=True):
                self.store.set(key, value)
        elif kind == EntryKind.QUEUE:
            for item in fields[1:]:
                self.store.restore_item(fields[0], item)
        elif kind == EntryKind.GONE:
            self.members.restore_leave_reason(number, fields[0].decode())
        elif kind == EntryKind.EVENT:
            self._member(number).restore_event(unpack_number(fields[0]), fields[1])
        elif kind == EntryKind.SUSPECTED:
            self.members.restore_suspicion(self._member(number), fields[0].decode())
        elif kind == EntryKind.SUSPECT:
            self.members.suspect(self._member(number), fields[0].decode())
            self.members.pop_notified()
        elif kind == EntryKind.LOSE:
            self._lose(self._member(number), fields[0].decode())
            self.members.pop_notified()
        elif kind == EntryKind.ACKNOWLEDGED:
            for member, taken in zip(map(unpack_number, fields[::2]), map(unpack_number, fields[1::2]), strict=True):
                self._member(member).acknowledge(taken)
        else:
            raise WireError("an unknown kind")

    def _replay_of_session(
        self, kind: int, session: ClientSession, number: int, fields: list[bytes], now: float
    ) -> None:
        if kind == EntryKind.REQUEST:
            session.received_at = now
            what = fields[0][0]
            self._handle(session, WireMessage(what, number, fields[1:]))
            self.members.pop_notified()
            if session.answered(number) is None and not (what == Op.BARRIER and number in session.parked):
                raise WireError("a request that is not granted here")
        elif kind == EntryKind.UNPOP:
            self.requeue_item(session, number)
        elif kind == EntryKind.UNPARK:
            self._unpark(session, number)
        elif kind == EntryKind.FORGET:
            self._forget_session(session)
        elif kind == EntryKind.SESSION:
            session.gone = fields[0].decode()
        elif kind == EntryKind.OPENED:
            session.opened_by = number
        elif kind == EntryKind.ANSWERS:
            for answered, answer in zip(map(unpack_number, fields[::2]), fields[1::2], strict=True):
                session.remember(answered, answer)
        elif kind == EntryKind.POPPED:
            session.record_popped(number, fields[0], fields[1])
        elif kind == EntryKind.PARKED:
            waiter = Waiter(session, (barrier_key(fields[0]),), accepts_queues=True)
            self._park(session, WireMessage(Op.BARRIER, number, fields), waiter)
        elif kind == EntryKind.MEMBER:
            facts, watches, last = fields
            watched = None if watches == b"all" else frozenset(map(unpack_number, filter(None, watches.split(b","))))
            session.member = self.members.restore(Member(number, session, facts, watched, now), unpack_number(last))
        else:
            raise WireError("an unknown kind")

    def _member(self, number: int) -> Member:
        member = self.members.get(number)
        if member is None:
            raise WireError(f"there is no member {number}")
        return member


def _describe_session(session: ClientSession) -> Iterator[JournalEntry]:
    route = session.route
    if session.gone:
        yield JournalEntry(EntryKind.SESSION, route, 0, [session.gone.encode()])
    if session.opened_by >= 0:
        yield JournalEntry(EntryKind.OPENED, route, session.opened_by, [])
    for fields in _grouped(((pack_number(number), answer) for number, answer in session.answers())):
        yield JournalEntry(EntryKind.ANSWERS, route, 0, fields)
    for number, (queue, item) in session.popped.items():
        yield JournalEntry(EntryKind.POPPED, route, number, [queue, item])
    for number, waiter in session.parked.items():
        message = waiter.owner[1]
        if message.what == Op.BARRIER:
            yield JournalEntry(EntryKind.PARKED, route, number, message.fields)


def _grouped(items: Iterable[tuple[bytes, ...]]) -> Iterator[list[bytes]]:
    """Yield the fields of items; small ones are combined."""
    fields: list[bytes] = []
    size = 0
    for item in items:
        grows = sum(map(len, item))
        if fields and (size + grows > _ENTRY_BYTES or len(fields) >= _ENTRY_FIELDS):
            yield fields
            fields, size = [], 0
        fields += item
        size += grows
    if fields:
        yield fields
