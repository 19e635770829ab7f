"""`StandbyReplicas` sends a coordinator's journal to its standbys, and delays answers until they acknowledge it.

    requests ──► journal ──cut──► batch n ──► every standby ──FOLLOWED n──┐
        └──────► answers ──delayed with n─────────────────────────────────┴──► released, to the clients

An answer leaves the coordinator when every required standby has all changes that the answer depends on. Answers to the
coordinator's own agent are not delayed, because the agent is lost with the coordinator.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from phalanx._comm.control.wire import MAX_MESSAGES, AnswerStatus, pack, pack_number
from phalanx._job.coordinator.journal import JournalEntry, pack_entry
from phalanx._job.coordinator.key_value import RefusedError
from phalanx._job.coordinator.session import Answer, ClientSession

STALLED_S = 1.0  # a standby that delays answers for longer than this is reported to its coordinator
_MOST_STREAMS = 16  # maximum number of standbys; a job needs two at a time
_PART_BYTES = 1 << 20  # maximum bytes of entries in one message; a single entry may be larger


@dataclass
class _Stream:
    """A `_Stream` is one standby: `sent` messages were sent to it, and it has all batches up to `acknowledged`."""

    session: ClientSession
    sent: int = 0
    acknowledged: int = -1


class StandbyReplicas:
    """`StandbyReplicas` tracks the standbys, the batches that each of them has, and the answers that wait for them.

    Another thread may set `required`, `leader` and `confirmed_members`.

    required: tickets of the standbys that must acknowledge before an answer is sent.
    leader: the member to which answers are never delayed.
    confirmed_members: the members whose loss another member must confirm; until then they are only suspected.
    on_stalled: called with the ticket of a required standby that delays answers.
    """

    def __init__(self) -> None:
        self.required: frozenset[bytes] = frozenset()
        self.leader = -1
        self.confirmed_members: frozenset[int] = frozenset()
        self.on_stalled: Callable[[bytes], object] = lambda ticket: None
        self._streams: dict[bytes, _Stream] = {}
        self._batch = 0
        self._delayed: deque[tuple[int, ClientSession, list[Answer]]] = deque()
        self._delayed_since = 0.0
        self._reported: set[bytes] = set()  # the tickets that `on_stalled` has received

    @property
    def is_active(self) -> bool:
        """Return whether there are standbys or required standbys, or answers are delayed."""
        return bool(self._streams or self.required or self._delayed)

    def begin(self, ticket: bytes, session: ClientSession, state: Sequence[JournalEntry]) -> list[Answer]:
        """Register a standby; return the messages that carry the whole state to it.

        Raises:
            RefusedError: there are too many standbys.
        """
        if ticket not in self._streams and len(self._streams) >= _MOST_STREAMS:
            raise RefusedError(f"{len(self._streams)} standbys already follow this coordinator")
        self._streams[ticket] = stream = _Stream(session)
        return self._pack(stream, state)

    def cut(self, entries: Sequence[JournalEntry]) -> Iterator[tuple[ClientSession, list[Answer]]]:
        """Begin another batch with the changes `entries`; yield each standby's session with the messages for it."""
        if entries:
            self._batch += 1
            for stream in self._streams.values():
                yield stream.session, self._pack(stream, entries)

    def _pack(self, stream: _Stream, entries: Sequence[JournalEntry]) -> list[Answer]:
        parts: list[list[bytes]] = [[]]
        size = 0
        for entry in entries:
            packed = pack_entry(entry)
            if parts[-1] and (size + len(packed) > _PART_BYTES or len(parts[-1]) == MAX_MESSAGES):
                parts.append([])
                size = 0
            parts[-1].append(packed)
            size += len(packed)
        messages: list[Answer] = []
        for number, part in enumerate(parts, 1):
            stream.sent += 1
            batch = pack_number(self._batch) if number == len(parts) else b""
            messages.append(pack(AnswerStatus.JOURNAL, stream.sent, batch, b"".join(part)))
        return messages

    def acknowledge(self, ticket: bytes, session: ClientSession, batch: int) -> None:
        """Record that a standby has all batches up to this batch."""
        stream = self._streams.get(ticket)
        if stream is not None and stream.session is session:
            stream.acknowledged = max(stream.acknowledged, min(batch, self._batch))
            self._reported.discard(ticket)

    def lose(self, session: ClientSession) -> bool:
        """Remove the standby behind `session`, which cannot be reached; return whether the session was a standby's."""
        lost = [ticket for ticket, stream in self._streams.items() if stream.session is session]
        for ticket in lost:
            del self._streams[ticket]
            if ticket in self.required:
                self._report_stalled(ticket)
        return bool(lost)

    @property
    def is_followed(self) -> bool:
        return bool(self._streams)

    def follows(self, session: ClientSession) -> bool:
        return any(stream.session is session for stream in self._streams.values())

    @property
    def _common(self) -> int:
        """Return the newest batch that all required standbys have, with all earlier batches."""
        streams = [self._streams.get(ticket) for ticket in self.required]
        return min((-1 if each is None else each.acknowledged for each in streams), default=self._batch)

    def delay(self, session: ClientSession, answers: list[Answer]) -> bool:
        """Delay answers that may depend on changes that a required standby lacks; return whether they are delayed."""
        if self._common >= self._batch and not self._delayed:
            return False
        member = session.member
        if (member is not None and member.id == self.leader) or self.follows(session):
            return False
        if not self._delayed:
            self._delayed_since = time.monotonic()
        self._delayed.append((self._batch, session, answers))
        return True

    def release(self) -> Iterator[tuple[ClientSession, list[Answer]]]:
        """Yield the delayed answers whose changes all required standbys have."""
        common = self._common
        while self._delayed and self._delayed[0][0] <= common:
            _, session, answers = self._delayed.popleft()
            self._delayed_since = time.monotonic()
            yield session, answers

    def check(self, now: float) -> None:
        """Report the required standbys that have delayed answers for too long."""
        if self._delayed and now - self._delayed_since > STALLED_S:
            common = self._common
            for ticket in self.required:
                stream = self._streams.get(ticket)
                if stream is None or stream.acknowledged == common:
                    self._report_stalled(ticket)

    def _report_stalled(self, ticket: bytes) -> None:
        if ticket not in self._reported:
            self._reported.add(ticket)
            self.on_stalled(ticket)
