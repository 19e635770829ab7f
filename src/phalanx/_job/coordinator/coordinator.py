"""The `Coordinator` keeps the state of a job and answers requests. It uses no sockets; callers pass the time.

frame from a session ──► handle() ──► answers, for this session and for those that waited  ──► outgoing
                time ──► tick()   ──► members that are lost, events for the others         ──► outgoing

Standbys on other hosts copy its state as journal entries. A copy replays the entries, and can take over.

primary ── snapshot ──► entries ──► replay ── copy
   │                                             │
   └── journal.drain, as it changes ──► replay ───┘── take_over: it is the primary now
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from phalanx._base.loss_detection import CONNECTION_ENDED_S, MEMBER_TIMEOUT_S, heartbeat_s
from phalanx._comm.control.wire import (
    MAX_FIELDS,
    MAX_VALUE_BYTES,
    VERSION,
    AnswerStatus,
    Op,
    WireError,
    WireMessage,
    pack,
    pack_number,
    unpack,
    unpack_number,
    unpack_text,
)
from phalanx._comm.diagnostics.printable import printable
from phalanx._job.coordinator.journal import EntryKind, JournalEntry
from phalanx._job.coordinator.key_value import KeyValueStore, RefusedError, Waiter
from phalanx._job.coordinator.membership import MAX_FACTS_BYTES, MAX_MEMBERS, OUTBOX_BYTES, Member, Membership
from phalanx._job.coordinator.session import Answer, ClientSession, RelayedRoute, Route
from phalanx._job.coordinator.standby_replicas import StandbyReplicas
from phalanx._job.coordinator.store_requests import StoreRequestHandler, barrier_key

# maximum bytes of events (joins, leaves and messages) that wait for one member; beyond this the member is lost
MAX_WAITING_BYTES = 8 * OUTBOX_BYTES
MAX_SESSIONS = 1 << 16
MAX_ROUTE_BYTES = 64
FORGOTTEN_AFTER_S = 600.0  # a session that is silent for this long is forgotten, unless it is a member's or its relay's
UNPARKED_AFTER_S = 60.0  # a silent session's waiting requests are dropped: a live client repeats them every few seconds
SWEEP_EVERY_S = 5.0
MAX_OUTGOING_BYTES = 4 * MAX_VALUE_BYTES  # of answers that wait for a client; beyond this, its requests are refused
_PAGE_BYTES = 4 << 20
_STATUS_AT = 2  # the index of the status in an answer
# limits of one journal entry of a snapshot; an entry with a single item may exceed them
_ENTRY_BYTES, _ENTRY_FIELDS = 1 << 20, 1 << 10

_CHANGES = frozenset({
    Op.SET, Op.ADD, Op.COMPARE_SET, Op.APPEND, Op.DELETE, Op.MULTI_SET, Op.QUEUE_PUSH, Op.QUEUE_POP, Op.DELETE_PREFIX,
    Op.JOIN, Op.LEAVE, Op.POST, Op.BARRIER, Op.ADD_ITEMS,
})  # fmt: skip

# Requests that read the whole state. A frame may contain only one, so that no client delays the others for long.
_LONG = frozenset({Op.LIST_KEYS, Op.DELETE_PREFIX, Op.MEMBERS})


class Coordinator(StoreRequestHandler):
    """A `Coordinator` keeps the state of one job. It can be copied to standbys, and can itself be a copy."""

    def __init__(self, *, job: str = "", lost_after_s: float = MEMBER_TIMEOUT_S, max_bytes: int = 1 << 30) -> None:
        super().__init__(KeyValueStore(max_bytes))
        self.job = job
        self.epoch = os.urandom(8)  # distinguishes this coordinator from an earlier one
        self.members = Membership(lost_after_s)
        self.sessions: dict[Route, ClientSession] = {}
        self.num_malformed = 0
        self.replicas = StandbyReplicas()
        self._datagrams: list[tuple[ClientSession, list[Answer]]] = []
        self._swept_at = -math.inf  # when all sessions were last checked
        self._handlers: dict[int, Callable[[ClientSession, WireMessage], Answer | None]] = {
            Op.HELLO: self._hello, Op.SET: self._set, Op.GET: self._get, Op.ADD: self._add,
            Op.COMPARE_SET: self._compare_set, Op.APPEND: self._append, Op.CHECK: self._check, Op.WAIT: self._wait,
            Op.DELETE: self._delete, Op.NUM_KEYS: self._num_keys, Op.MULTI_GET: self._multi_get,
            Op.MULTI_SET: self._multi_set, Op.QUEUE_PUSH: self._queue_push, Op.QUEUE_POP: self._queue_pop,
            Op.QUEUE_LEN: self._queue_len, Op.LIST_KEYS: self._list_keys, Op.DELETE_PREFIX: self._delete_prefix,
            Op.CANCEL: self._cancel, Op.JOIN: self._join, Op.LEAVE: self._leave, Op.HEARTBEAT: self._heartbeat,
            Op.MEMBERS: self._list_members, Op.POST: self._post, Op.BARRIER: self._barrier,
            Op.ADD_ITEMS: self._add_items, Op.RELAY_OWNER: self._set_opener,
            Op.FOLLOW: self._follow, Op.FOLLOWED: self._followed, Op.DATAGRAM: self._datagram,
        }  # fmt: skip

    def handle(self, route: Route, frame: bytes, now: float) -> bool:
        """Execute the requests in a frame; return False if part of it is malformed, or there are too many sessions."""
        session = self.sessions.get(route)
        if session is None:
            if len(self.sessions) >= MAX_SESSIONS:
                return False
            session = self.sessions[route] = ClientSession(route, now)
        session.received_at = now
        if session.member is not None:
            self.members.record_message(session.member, now)
        try:
            messages = unpack(frame, MAX_FIELDS)  # a frame may hold millions of empty messages
        except WireError:
            self.num_malformed += 1
            return False
        if messages and messages[0].what in (Op.RELAY, Op.UNDELIVERED):
            return self._handle_relay(route, messages, now)
        fine, num_long = True, 0
        for message in messages:
            num_long += message.what in _LONG
            if num_long > 1 and message.what in _LONG:
                self._send(session, pack(AnswerStatus.WRONG_CALL, message.number, b"one such request at a time"))
            else:
                fine &= self._handle(session, message)
        return fine

    def _handle_relay(self, relay: Route, messages: list[WireMessage], now: float) -> bool:
        """Execute the requests of the processes behind a relay, each of which has its own session."""
        if isinstance(relay, RelayedRoute):
            self.num_malformed += 1
            return False
        fine = True
        for what, _, fields in messages:
            if what == Op.RELAY and len(fields) % 2 == 0:
                for route, frame in zip(fields[::2], fields[1::2], strict=True):
                    fine &= len(route) <= MAX_ROUTE_BYTES and self.handle(RelayedRoute(relay, route), frame, now)
            elif what == Op.UNDELIVERED and fields:
                fine &= self._process_undelivered(RelayedRoute(relay, fields[0]), fields[1:])
            else:
                fine = False
        self.num_malformed += not fine
        return fine

    def _process_undelivered(self, route: Route, numbers: Sequence[bytes]) -> bool:
        session = self.sessions.get(route)
        try:
            for number in map(unpack_number, numbers):
                if session is not None:
                    self.requeue_item(session, number)
        except WireError:
            return False
        if session is not None and session.member is not None:
            session.member.rewind(0)
        return True

    def _handle(self, session: ClientSession, message: WireMessage) -> bool:
        what, number, fields = message
        handler = self._handlers.get(what)
        if handler is None:
            self.num_malformed += 1
            return False
        fine = True
        if number in session.parked:  # the client has repeated a request that waits
            self._send(session, pack(AnswerStatus.PARKED, number))
            return True
        answer: Answer | None = session.answered(number) if what in _CHANGES else None
        if answer is None and session.outgoing_bytes > MAX_OUTGOING_BYTES:
            answer = pack(AnswerStatus.WRONG_CALL, number, b"this client requests more than it reads")
        if answer is None:
            at = len(self.journal)
            try:
                answer = handler(session, message)
            except RefusedError as error:
                answer = pack(AnswerStatus.WRONG_CALL, number, str(error).encode())
            except (WireError, ValueError, IndexError, RecursionError):  # the fields do not match this request
                self.num_malformed += 1
                answer = pack(AnswerStatus.WRONG_CALL, number, f"malformed request ({what})".encode())
                fine = False
            else:
                granted = False
                if (
                    what in _CHANGES
                    and isinstance(answer, bytes)
                    and answer[_STATUS_AT] in (AnswerStatus.OK, AnswerStatus.EMPTY)
                ):
                    granted = True
                    session.remember(number, answer)
                if granted or (what == Op.BARRIER and answer is None):  # a barrier counts a call before it waits
                    self.journal.add(EntryKind.REQUEST, session.route, number, bytes((what,)), *fields, at=at)
        if answer is not None:
            self._send(session, answer)
        return fine

    def tick(self, now: float) -> list[str]:
        """Find lost members and stalled standbys, and forget silent sessions. Return lines for the log."""
        self.replicas.check(now)
        lines = []
        for member in self.members.silent(now):
            silence_s = now - member.received_at
            why = f"the coordinator received nothing from it for {silence_s:.1f} s (the limit is {self._limit})"
            lines += self._find_lost(member, why)
        for member in self.members.pop_grown():
            if member.num_bytes > MAX_WAITING_BYTES and not member.suspicion:
                why = f"{member.num_bytes >> 20} MiB of events are queued for it, and it does not read them"
                lines += self._find_lost(member, why)
        lines += [
            self.lose(member, member.suspicion)
            for member in self.members.suspects
            if not self._must_be_confirmed(member)
        ]
        if self.journal.is_kept and (taken := self.members.pop_progress()):
            self.journal.add(EntryKind.ACKNOWLEDGED, None, 0, *map(pack_number, taken))
        if now - self._swept_at < SWEEP_EVERY_S:
            return lines
        self._swept_at = now
        for session in list(self.sessions.values()):
            silent_s = now - session.received_at
            if silent_s > UNPARKED_AFTER_S and session.parked:
                self._unpark_repeatable(session)
            is_of_member = session.member is not None or self.members.get(session.relay_owner) is not None
            if silent_s > FORGOTTEN_AFTER_S and not is_of_member:
                self.journal.add(EntryKind.FORGET, session.route, 0)
                self._forget_session(session)
        return lines

    def _forget_session(self, session: ClientSession) -> None:
        for number in list(session.parked):
            self._unpark(session, number)
        del self.sessions[session.route]

    def note_pause(self, pause_s: float, now: float) -> None:
        """Extend all deadlines by a pause in which the coordinator did not run.

        No member is lost because of the pause, and every session keeps its answers for clients that repeat a request.
        """
        self.members.note_pause(pause_s, now)
        for session in self.sessions.values():
            session.received_at = min(now, session.received_at + pause_s)

    @property
    def _limit(self) -> str:
        return f"{self.members.lost_after_s:g} s"

    def lose_disconnected(self, route: Route, silent_since: float) -> list[str]:
        """Declare the member behind a route lost, if there is one: its connection has ended. Return lines for the log.

        If nothing was received since `silent_since`, the connection was closed because of its silence: `tick` decides.
        """
        session = self.sessions.get(route)
        if session is None or session.member is None or session.received_at <= silent_since:
            return []
        why = f"its connection to the coordinator has ended, and it did not connect again for {CONNECTION_ENDED_S:g} s"
        return [] if session.member.suspicion else self._find_lost(session.member, why)

    def _find_lost(self, member: Member, why: str) -> list[str]:
        """Declare a member lost, or suspect it until another member confirms the loss. Return lines for the log."""
        if not self._must_be_confirmed(member):
            return [self.lose(member, why)]
        self.journal.add(EntryKind.SUSPECT, None, member.id, why.encode())
        self.members.suspect(member, why)
        self._send_changes()
        return []

    def _must_be_confirmed(self, member: Member) -> bool:
        """Return whether another member must confirm the loss of this one.

        Otherwise an isolated coordinator would declare all others lost, and its standbys would copy their own loss.
        """
        return member.id in self.replicas.confirmed_members and member.id != self.replicas.leader

    def lose(self, member: Member, why: str) -> str:
        """Declare a member lost, and notify the others and the member of the reason. Return a line for the log."""
        self.journal.add(EntryKind.LOSE, None, member.id, why.encode())
        return self._lose(member, why)

    def _lose(self, member: Member, why: str) -> str:
        session = member.owner
        assert isinstance(session, ClientSession)
        self.members.remove(member, b"lost", why)
        session.member, session.gone = None, why
        self._unpark_repeatable(session)
        self._send(session, pack(AnswerStatus.UNKNOWN, 0, why.encode(), pack_number(member.id)))
        if relays := {one.route for one in self.sessions.values() if one.relay_owner == member.id}:
            self.end_clients(one for one in self.sessions.values() if one.route[0] in relays)
        self._send_changes()
        return f"member {member.id} ({self.name_of(member)}) is lost: {why}"

    def end_clients(self, sessions: Iterable[ClientSession]) -> None:
        """Cancel the waits of clients that were lost with their host.

        The item that a lost client popped last is put back into its queue if the client has changed nothing since.
        """
        lost = list(sessions)
        for session in lost:
            self._unpark_repeatable(session)
        for session in lost:
            if session.popped and (number := next(reversed(session.popped))) >= session.newest:
                self.requeue_item(session, number)

    def who(self, route: Route) -> str:
        """Return the name of the client behind `route`, for the log."""
        session = self.sessions.get(route)
        member = session.member if session is not None else None
        return "a client with the job's key" if member is None else f"member {member.id} ({self.name_of(member)})"

    def name_of(self, member: Member) -> str:
        """Return the name of a member, for the log: its host's name, if the member has reported one."""
        try:
            facts = json.loads(member.facts)
            name = str(facts.get("host") or f"member {member.id}")[:200]
        except (ValueError, AttributeError, RecursionError):
            return f"member {member.id}"
        return printable(name)

    # Handlers of requests. Each returns the answer, or None if the request waits or has no answer.

    def _hello(self, session: ClientSession, message: WireMessage) -> Answer:
        version = unpack_number(message.fields[0])
        if version != VERSION:
            raise RefusedError(
                f"the coordinator uses version {VERSION} of the protocol, and this client version {version}"
            )
        return pack(AnswerStatus.OK, message.number, self.job.encode(), repr(self.members.lost_after_s).encode())

    def _set_opener(self, session: ClientSession, message: WireMessage) -> None:
        member = unpack_number(message.fields[0])
        if self.members.get(member) is None:
            raise WireError("there is no such member")
        session.relay_owner = member
        self.journal.add(EntryKind.OPENED, session.route, session.relay_owner)

    def _cancel(self, session: ClientSession, message: WireMessage) -> None:
        number = unpack_number(message.fields[0])
        waiter = self._unpark(session, number)
        if waiter is not None and waiter.owner[1].what == Op.BARRIER:
            self.journal.add(EntryKind.UNPARK, session.route, number)
        self.requeue_item(session, number)  # the item may have been sent before this cancellation arrived

    def _join(self, session: ClientSession, message: WireMessage) -> Answer:
        facts, watches = message.fields
        if len(facts) > MAX_FACTS_BYTES or len(self.members) >= MAX_MEMBERS:
            raise RefusedError(f"facts of {len(facts)} bytes (at most {MAX_FACTS_BYTES}), {len(self.members)} members")
        if not isinstance(json.loads(facts), dict):
            raise WireError("facts are not an object")
        watched = None if watches == b"all" else frozenset(map(unpack_number, filter(None, watches.split(b","))))
        if session.member is not None:  # the client did not receive the answer to an earlier join in time
            self._part_with(session, session.member, "it joins again")
        session.member = self.members.join(session, facts, watched, session.received_at)
        session.gone = ""
        self._send_changes()
        return pack(AnswerStatus.OK, message.number, pack_number(session.member.id))

    def _leave(self, session: ClientSession, message: WireMessage) -> Answer:
        who, why = unpack_number(message.fields[0]), unpack_text(message.fields[1])[:4096]
        me = session.member
        if me is None:
            return self._unknown(session, message)
        if who in (-1, me.id):
            self._part_with(session, me, why)
            self._send_changes()
        elif (member := self.members.get(who)) is not None:
            self._lose(member, member.suspicion or f"{self.name_of(me)} (member {me.id}) says: {why}")
        return pack(AnswerStatus.OK, message.number)

    def _part_with(self, session: ClientSession, member: Member, why: str) -> None:
        self.members.remove(member, b"left", why)
        session.member, session.gone = None, why or "it left"
        self._unpark_repeatable(session)

    def _heartbeat(self, session: ClientSession, message: WireMessage) -> Answer:
        if session.member is None:
            return pack(AnswerStatus.UNKNOWN, 0, (session.gone or "it has not joined").encode(), message.fields[1])
        taken, seen = message.number, unpack_number(message.fields[0])
        session.member.acknowledge(taken)
        if seen < session.member.sent:  # events are in flight, or lost with a connection; repeating them does no harm
            session.member.rewind(seen)
            self.outgoing[session] = None
        beat_s = heartbeat_s(self.members.lost_after_s, len(self.members))
        return pack(AnswerStatus.HEARTBEAT, taken, b"%.3f" % beat_s)

    def _unknown(self, session: ClientSession, message: WireMessage) -> Answer:
        return pack(AnswerStatus.UNKNOWN, message.number, (session.gone or "it has not joined").encode(), b"-1")

    def _list_members(self, session: ClientSession, message: WireMessage) -> Answer:
        start = unpack_number(message.fields[0]) if message.fields else 0
        found: list[bytes] = []
        size = 0
        for member in self.members:
            if member.id >= start and (not found or size < _PAGE_BYTES) and len(found) < 1024:
                found += (pack_number(member.id), member.facts)
                size += len(member.facts)
        return pack(AnswerStatus.OK, message.number, *found)

    def _post(self, session: ClientSession, message: WireMessage) -> Answer:
        to, detail = unpack_number(message.fields[0]), message.fields[1]
        me = session.member
        if me is None:
            return self._unknown(session, message)
        if len(detail) > MAX_VALUE_BYTES:
            raise RefusedError(f"a message of {len(detail)} bytes; the longest may have {MAX_VALUE_BYTES}")
        if to == -1:
            receivers = [member for member in self.members if member is not me]
        else:
            receivers = [member for member in (self.members.get(to),) if member is not None]
        if to != -1 and not receivers:
            raise RefusedError(
                f"there is no member {to} (any more): {self.members.find_leave_reason(to) or 'it never joined'}"
            )
        if not self.is_copy and not all(member.has_room(len(detail)) for member in receivers):
            return pack(AnswerStatus.BUSY, message.number)
        for member in receivers:
            self.members.post(me.id, member, detail)
            assert isinstance(member.owner, ClientSession)
            self.outgoing[member.owner] = None
        return pack(AnswerStatus.OK, message.number)

    def _send_changes(self) -> None:
        for member in self.members.pop_notified():
            assert isinstance(member.owner, ClientSession)
            self.outgoing[member.owner] = None

    # Standbys on other hosts.

    def pop_outgoing(self) -> Iterator[tuple[ClientSession, list[Answer]]]:
        """Yield the answers that may be sent, by session; the rest wait until all required standbys acknowledge."""
        datagrams, self._datagrams = self._datagrams, []
        yield from datagrams
        replicas = self.replicas
        if not replicas.is_active:
            yield from super().pop_outgoing()
            return
        self._cut()
        yield from replicas.release()
        for session, answers in super().pop_outgoing():
            if not replicas.delay(session, answers):
                yield session, answers

    def _cut(self) -> None:
        """Send the changes since the last call to the standbys."""
        for session, messages in self.replicas.cut(self.journal.drain()):
            for message in messages:
                self._send(session, message)

    def undelivered(self, session: ClientSession, answers: Iterable[Answer]) -> None:
        if self.replicas.lose(session) and not self.replicas.is_followed:
            self.journal.stop()
        super().undelivered(session, answers)

    def _follow(self, session: ClientSession, message: WireMessage) -> None:
        (ticket,) = message.fields
        self._cut()  # the snapshot below contains the changes so far
        self.journal.is_kept = True
        for part in self.replicas.begin(ticket, session, self.snapshot()):
            self._send(session, part)

    def _followed(self, session: ClientSession, message: WireMessage) -> None:
        ticket, batch = message.fields
        self.replicas.acknowledge(ticket, session, unpack_number(batch))

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
        """Apply an entry of the coordinator that this one copies; the caller passes all entries in order.

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
        """Become the primary: all results that clients have received from the former one are valid here.

        Clients are not counted as silent for the time before this call, in which this copy received no messages.
        """
        self.is_copy = False
        self.outgoing.clear()
        for session in self.sessions.values():
            session.received_at = now
        for member in self.members:
            member.received_at = now
            self.members.restore_suspicion(member, "")  # this coordinator decides itself whether a member is lost
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
            session.relay_owner = number
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
    if session.relay_owner >= 0:
        yield JournalEntry(EntryKind.OPENED, route, session.relay_owner, [])
    for fields in _grouped(((pack_number(number), answer) for number, answer in session.answers())):
        yield JournalEntry(EntryKind.ANSWERS, route, 0, fields)
    for number, (queue, item) in session.popped.items():
        yield JournalEntry(EntryKind.POPPED, route, number, [queue, item])
    for number, waiter in session.parked.items():
        message = waiter.owner[1]
        if message.what == Op.BARRIER:
            yield JournalEntry(EntryKind.PARKED, route, number, message.fields)


def _grouped(items: Iterable[tuple[bytes, ...]]) -> Iterator[list[bytes]]:
    """Yield the fields of items, in groups that each fit in a journal entry."""
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
