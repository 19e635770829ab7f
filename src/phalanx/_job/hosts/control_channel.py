"""`ControlChannel` sends messages between the agents of a job through the coordinator, without blocking the agent.

agent ── put ──▶ queue ──▶ thread ──▶ coordinator ──▶ events ── fileno, receive ──▶ agent
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx._base.deadline import Deadline
from phalanx._base.ipc.wakeup import Mailbox
from phalanx._comm.control.address import Address
from phalanx._comm.control.client import Client
from phalanx._comm.control.event import Event
from phalanx._comm.control.wire import MALFORMED, MAX_MESSAGES
from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx._job.coordinator.service import Service


FIRST = 0  # the first host's member number: it joins before any other host can
_POST_S = 5.0  # the timeout of one attempt to send; failed attempts are repeated
MAX_WAITING_BYTES = 1 << 20
_FLUSH_PAUSE_S = 0.005
_FULL_PAUSE_S = 0.005  # before resending messages to a full outbox


@dataclass(frozen=True)
class ControlMessage:
    """A `ControlMessage` is a message from `member`, which chose the `kind` and the `body`."""

    kind: str
    member: int
    body: dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A `Change` is the coordinator's notice that `member` has joined, has left, or is lost.

    A `Change` can also concern this process: the job has expelled it, or its coordinator is unreachable or reachable
    again. Members cannot send a `Change`.
    """

    kind: str
    member: int
    facts: dict[str, Any]  # the facts of a member that has joined
    why: str


class Notices(Mailbox[str]):
    """`Notices` receives lines for the user from other threads of this process."""

    def put_refusal(self, line: str) -> None:
        """Put a line from the coordinator, unless it is about a lost member: the agent reports those in more detail."""
        if not line.startswith("member "):
            self.put(line)


class ControlChannel:
    """A `ControlChannel` sends and receives an agent's messages. It owns `client` and the sending thread.

    first: the member number of the leader, which is the first host until another host takes over.
    survives: whether to keep unsent messages when the coordinator is lost, because another coordinator may take over.
    """

    def __init__(self, client: Client, notices: Notices | None = None) -> None:
        self._client = client
        self.member = client.member
        self.first = FIRST
        self.survives = False
        self._redirects = 0  # how often another coordinator has taken over
        self._is_paused = False
        self._own_lines: list[bytes] = []  # messages that were unsent to the former leader when this host took over
        self.notices = notices or Notices()
        self._queue = SendQueue()
        self._lock = threading.Condition()
        self._is_closing = False
        self._number = 0
        self._received: dict[int, int] = {}  # member -> number of its last message, which a reconnection may repeat
        self._put_back: list[ControlMessage | Change] = []
        self._offsets: dict[int, float] = {}  # member -> an upper bound on how far its clock is behind this host's
        self._thread = threading.Thread(target=self._send, name="phalanx-control", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Return the coordinator's endpoint in ZeroMQ's syntax."""
        return self._client.endpoint

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has something."""
        return self._client.fileno()

    @property
    def full(self) -> bool:
        """Return whether so many bytes are unsent that the ranks' output should not be read for now."""
        return self._queue.num_bytes > MAX_WAITING_BYTES

    def put(self, member: int, kind: str, **body: Any) -> None:
        """Queue a message to `member` (-1: to all others)."""
        self.put_many((member,), kind, **body)

    def put_many(self, members: Iterable[int], kind: str, **body: Any) -> None:
        """Queue the same message to each of `members`; it is encoded once."""
        with self._lock:
            self._number += 1
            data = json.dumps({"kind": kind, "number": self._number, "now": time.monotonic(), **body}).encode()
            for member in members:
                self._queue.put(member, data)
            self._lock.notify()

    def put_key(self, key: str, value: bytes) -> None:
        """Queue a write of `value` to `key` in the store; the write completes before later messages are sent."""
        with self._lock:
            self._queue.put(KEY, key.encode() + b"\0" + value)
            self._lock.notify()

    def put_datagram(self, member: int, **body: Any) -> None:
        """Send a message of kind "datagram" at once, ahead of the queue; it may be lost."""
        self._client.send_datagram(member, json.dumps(body).encode())

    def expel(self, member: int) -> None:
        """Expel `member` from the job, after the messages that are already queued for it."""
        with self._lock:
            self._queue.put(member, b"")
            self._lock.notify()

    def put_back(self, messages: Sequence[ControlMessage | Change]) -> None:
        """Put messages back for the next `receive`; `has_more` is then true, but the descriptor is not readable."""
        self._put_back += messages

    @property
    def has_more(self) -> bool:
        """Return whether `receive` has a message that was put back."""
        return bool(self._put_back)

    def receive(self) -> list[ControlMessage | Change]:
        """Return the messages that have arrived, without waiting."""
        messages, self._put_back = self._put_back, []
        for event in self._client.receive_events():
            if event.kind == "datagram":
                with contextlib.suppress(*MALFORMED):
                    messages.append(ControlMessage("datagram", event.member, dict(_decode(event.body))))
                continue
            if event.kind != "message":
                messages.append(_read_change(event))
                continue
            for line in event.body.split(b"\n"):
                message = self.read_line(event.member, line)
                if message is not None:
                    messages.append(message)
        return messages

    def read_line(self, member: int, line: bytes) -> ControlMessage | None:
        """Return the message in a line; None if the line is invalid or repeats an earlier message."""
        try:
            body = _decode(line)
            kind, number, sent_at = str(body.pop("kind")), int(body.pop("number")), float(body.pop("now"))
        except MALFORMED:
            return None  # another version of Phalanx, or another program
        if number <= self._received.get(member, 0):
            return None
        self._received[member] = number
        behind = time.monotonic() - sent_at
        self._offsets[member] = min(behind, self._offsets.get(member, behind))
        return ControlMessage(kind, member, body)

    def to_own_clock(self, member: int, at: float) -> float:
        """Convert a time on `member`'s clock to this host's; the result is late by the lowest latency of a message."""
        return at + self._offsets.get(member, 0.0)

    def join_again(self, facts: Mapping[str, Any], timeout_s: float, watch: Collection[int]) -> None:
        """Join as a new member, after the old membership has ended; drop unsent messages and received changes.

        Raises:
            PhalanxError: the coordinator does not answer within `timeout_s`.
        """
        with self._lock:
            self._queue.drop()
        self._client.timeout = timeout_s
        if self._client.member >= 0:  # the member may be in the job again, but its ranks have ended
            self._client.leave("it had lost the first host")
        self.member = self._client.join(facts, watch=watch)
        self._put_back = [message for message in self.receive() if isinstance(message, ControlMessage)]

    @property
    def is_removed(self) -> bool:
        """Return whether the coordinator itself has reported that this host is no longer a member."""
        return self._client.is_removed

    def redirect(self, first: int, address: Address, epoch: bytes, timeout_s: float) -> None:
        """Switch to the coordinator of the new leader, member `first`.

        Unsent messages are dropped, except lines of the ranks' output, which go to the new leader.

        Raises:
            PhalanxError: the new coordinator cannot be reached within `timeout_s`.
        """
        with self._lock:
            self._redirects += 1
            self._is_paused = True
        try:
            self._client.follow_member(self.member, address, epoch, timeout_s)
            self._readdress(first)
        finally:
            with self._lock:
                self._is_paused = False
                self._lock.notify()

    def attach_to(self, service: Service) -> None:
        """Exempt this member and the coordinator in this process from each other's timeouts."""
        service.exempt(self._client)

    def _readdress(self, first: int) -> None:
        with self._lock:
            kept = [
                OutgoingEntry(first, data) for to, data in self._queue.unsent if to == self.first and _is_lines(data)
            ]
            if first == self.member:
                self._own_lines, kept = [entry.data for entry in kept], []
            self._queue.replace(kept)
            self.first = first

    @property
    def is_over(self) -> bool:
        """Return whether the coordinator has ended. This is slow, because it connects to the coordinator's port."""
        return self._client.is_over()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all messages are sent; return False if time runs out or the channel stops sending."""
        Deadline.after(timeout_s).wait_until(
            lambda: not self._queue.num_bytes or not self._thread.is_alive(), _FLUSH_PAUSE_S
        )
        return not self._queue.num_bytes

    def drain(self, kind: str) -> list[dict[str, Any]]:
        """Stop sending, because the receiver is lost; return the unsent messages of this kind."""
        with self._lock:
            waiting = [json.loads(data) for member, data in self._queue.unsent if data and member != KEY]
            self._queue.drop()
            self._is_closing = True
            self._lock.notify()
        return [message for message in waiting if message["kind"] == kind]

    def pop_own_lines(self) -> list[dict[str, Any]]:
        """Return and forget the messages with output lines that were unsent when this host became the leader."""
        lines, self._own_lines = self._own_lines, []
        return [json.loads(data) for data in lines]

    def leave(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until all messages are sent, and then leave the job, also within `timeout_s`."""
        self.flush(timeout_s)
        self._client.timeout = timeout_s
        if self._client.member >= 0:
            with contextlib.suppress(PhalanxError):
                self._client.leave()

    def close(self) -> None:
        """Stop sending, and close the connection."""
        with self._lock:
            self._is_closing = True
            self._lock.notify()
        self._client.close()
        self._thread.join(_POST_S)
        self.notices.close()

    def _send(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._is_closing or (len(self._queue) and not self._is_paused))
                if self._is_closing:
                    return
                batch = self._queue.next_batch()
                redirects = self._redirects
            full = self._send_batch(batch, redirects)
            with self._lock:
                if full is None or redirects != self._redirects:
                    self._queue.restore_batch()
                else:
                    self._queue.complete_batch(full)
            if full:
                time.sleep(_FULL_PAUSE_S)

    def _send_batch(self, batch: Sequence[OutgoingEntry], redirects: int) -> Collection[int] | None:
        """Retry until the batch is sent; return the members with full outboxes, or None after `close` or `redirect`."""
        while not self._is_closing and redirects == self._redirects:
            try:
                return self._try_to_send(batch)
            except ValueError:  # the member has left
                return ()
            except PhalanxError:
                if self._client.member < 0 and not self.survives:
                    return ()  # this host is no longer a member, which an event reports
                time.sleep(0.05)
        return None

    def _try_to_send(self, batch: Sequence[OutgoingEntry]) -> Collection[int]:
        member, data = batch[0]
        if member == KEY:
            key, _, value = data.partition(b"\0")
            self._client.set(key.decode(), value)
        elif not data:
            self._client.expel(member, "the first host has expelled it")
        else:
            return {batch[place].member for place in self._client.post_all(batch, timeout=_POST_S)}
        return ()


def without_own_changes(messages: Sequence[ControlMessage | Change]) -> list[ControlMessage | Change]:
    """Return the messages without each `Change` of this process's own connection to a lost coordinator."""
    own = ("expelled", "unreachable", "reachable")
    return [each for each in messages if not (isinstance(each, Change) and each.kind in own)]


def _is_lines(data: bytes) -> bool:
    return data.startswith(b'{"kind": "lines"')


def _read_change(event: Event) -> Change:
    if event.kind != "joined":
        return Change(event.kind, event.member, {}, event.why)
    try:
        return Change(event.kind, event.member, dict(_decode(event.body)), "")
    except MALFORMED:  # the member is not an agent of this version
        return Change(event.kind, event.member, {}, "")


def _decode(data: bytes) -> Any:
    """Decode JSON; reject numbers that are not finite, whether spelled out (Infinity) or too large (1e999).

    Raises:
        ValueError: the data is not JSON, or contains such a number.
    """
    return json.loads(data, parse_constant=_finite, parse_float=_finite)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def encode_lines(lines: Sequence[bytes]) -> list[str]:
    """Encode lines of arbitrary bytes as text for JSON."""
    return [line.decode("utf-8", "surrogateescape") for line in lines]


def decode_lines(lines: Sequence[str]) -> list[bytes]:
    """Decode the result of `encode_lines`."""
    return [str(line).encode("utf-8", "surrogateescape") for line in lines]


# A `SendQueue` keeps an agent's unsent messages, in order, and decides which of them are sent together.
#
#     put ──▶ A1 A2 B1 C1 │ key │ A3    next_batch ──▶ A1+A2, B1, C1 ──▶ complete_batch: no room for B ──▶ B1 │ key │ A3
#
# Messages to one member arrive in the order in which they were put. The queue has no lock and no thread.

ALL = -1  # instead of a member: all other members
KEY = -2  # instead of a member: the data is a key of the store and its value
_MAX_LINES, _MAX_LINES_BYTES = 64, 1 << 18  # the limits of one message
_MAX_BATCH_BYTES = 1 << 20  # the limit of all messages that are sent together


class OutgoingEntry(NamedTuple):
    """An `OutgoingEntry` is `data` for `member`; empty data is the order to expel that member."""

    member: int
    data: bytes

    @property
    def is_alone(self) -> bool:
        """Return whether the entry is sent alone, after all earlier ones."""
        return self.member < 0 or not self.data


class SendQueue:
    """A `SendQueue` is the queue of one agent; `num_bytes` is the number of unsent bytes."""

    def __init__(self) -> None:
        self._waiting: deque[OutgoingEntry] = deque()
        self._sending: list[OutgoingEntry] = []  # the entries of the batch in progress
        self._full: frozenset[int] = frozenset()  # the members that had no room for the last batch
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def unsent(self) -> list[OutgoingEntry]:
        """Return all unsent entries, including the batch in progress."""
        return [*self._sending, *self._waiting]

    def put(self, member: int, data: bytes) -> None:
        self._waiting.append(OutgoingEntry(member, data))
        self.num_bytes += len(data)

    def next_batch(self) -> list[OutgoingEntry]:
        """Return the next batch: one entry that is sent alone, or one message for each of several members.

        A message joins consecutive entries for one member. The batch ends before a member's second message, unless that
        member's outbox was full: then the second message waits, and messages to others overtake it.
        """
        lines: dict[int, list[bytes]] = {}
        passed: list[OutgoingEntry] = []
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
        return [OutgoingEntry(member, b"\n".join(parts)) for member, parts in lines.items()]

    def _fits(self, entry: OutgoingEntry, lines: dict[int, list[bytes]], num_bytes: int) -> bool:
        """Return whether the entry can start a message of this batch, or extend the batch's last message."""
        if num_bytes + len(entry.data) > _MAX_BATCH_BYTES:
            return False
        if entry.member not in lines:
            return len(lines) < MAX_MESSAGES
        parts = lines[entry.member]
        is_next = self._sending[-1].member == entry.member
        return is_next and len(parts) < _MAX_LINES and sum(map(len, parts)) + len(entry.data) <= _MAX_LINES_BYTES

    def complete_batch(self, full: Collection[int] = ()) -> None:
        """Remove the sent batch, except messages to members in `full`, which are sent again first."""
        self.num_bytes -= sum(len(entry.data) for entry in self._sending if entry.member not in full)
        self._sending = [entry for entry in self._sending if entry.member in full]
        self.restore_batch()
        self._full = frozenset(full)

    def restore_batch(self) -> None:
        """Put the batch back at the front of the queue, because it may not have been sent."""
        self._waiting.extendleft(reversed(self._sending))
        self._sending = []

    def drop(self) -> None:
        """Drop all entries except the batch in progress."""
        self.num_bytes -= sum(len(entry.data) for entry in self._waiting)
        self._waiting.clear()

    def replace(self, entries: Collection[OutgoingEntry]) -> None:
        """Replace all entries, including the batch in progress, with `entries`."""
        self._sending = []
        self._waiting = deque(entries)
        self.num_bytes = sum(len(entry.data) for entry in entries)
