"""Combine the requests that a host's processes send to the coordinator, without using sockets or clocks.

    rank ─ CHECK a ─┐
    rank ─ CHECK a ─┼──▶ CHECK a                identical requests of ranks are sent once; one that arrives later
    rank ─ CHECK a ─┘                           waits for the next answer, since the first may be out of date
    rank ─ ADD_ITEMS row x ─┐
    rank ─ ADD_ITEMS row y ─┴──▶ ADD_ITEMS row x y
    rank ─ GET facts#once ──────▶ GET facts#once   the value never changes, and is cached
    rank ─ other requests ──────▶ the same         in the rank's own name

When a group starts, all ranks of a host send identical requests, and the coordinator receives one request per host.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx._comm.control.pending_call import resend_after
from phalanx._comm.control.wire import (
    MAX_FRAME_BYTES,
    MAX_MESSAGES,
    VERSION,
    WRITE_ONCE,
    AnswerStatus,
    Op,
    WireError,
    WireMessage,
    pack,
    pack_number,
    unpack,
    unpack_number,
)

OWN = b""  # the route of requests that are sent for several ranks
KEPT_S = 60.0
_MAX_KEPT = 8  # maximum number of cached values
_MAX_ANSWERED = 1024  # maximum number of answers to ADD_ITEMS that are kept for ranks that repeat the request
_MAX_ITEMS_BYTES = 1 << 20  # maximum bytes of items in one message
_ITEM_BYTES = 64  # minimum size that is counted for an item, since a message has room for only 65,535 fields
_ONCE = WRITE_ONCE.encode()
_SHARED = frozenset({Op.HELLO, Op.GET, Op.MULTI_GET, Op.WAIT, Op.CHECK, Op.COMPARE_SET, Op.ADD_ITEMS, Op.CANCEL})
_WAITING = frozenset({Op.GET, Op.MULTI_GET})  # the requests that the coordinator may answer later

RequestKey = tuple[bytes | int, ...]
Caller = tuple[bytes, int]  # the route of a rank, and the number of its request


@dataclass
class _Question:
    """A `_Question` is a request to the coordinator, which is sent once for all `callers`."""

    words: RequestKey  # the operation and its fields: requests with the same words are combined
    what: int
    fields: list[bytes]
    # by caller: the operation that it requested, and the index of its first item
    callers: dict[Caller, tuple[int, int]] = field(default_factory=dict)
    number: int = 0
    # whether it was sent at least once: the coordinator may have answered it, so a new caller needs another question
    is_sent: bool = False
    is_to_be_sent: bool = True
    is_parked: bool = False  # the coordinator has confirmed that it will answer later
    asked_at: float = 0.0
    num_asked: int = 0
    num_bytes: int = 0

    @property
    def ask_again_at(self) -> float:
        """Return when to repeat the question if it is still unanswered."""
        return self.asked_at + resend_after(self.num_asked, is_parked=self.is_parked)


class HostRequests:
    """`HostRequests` keeps the combined requests of a host's processes until they are answered.

    Pass received messages to `receive_requests` and `receive_answers`; send the messages of `pop_outgoing` and
    `pop_answers`.
    """

    def __init__(self) -> None:
        self._outgoing: list[tuple[bytes, bytes]] = []
        self._to_ask: list[_Question] = []  # questions that go out with the next message
        self._answers: list[tuple[bytes, bytes]] = []
        self._number = 1
        self._hello: list[bytes] = []  # the coordinator's answer to a hello
        self._under_way: dict[int, _Question] = {}  # by number
        self._current: dict[RequestKey, _Question] = {}  # the newest questions under way, by their words
        # questions that are sent when the current one with the same words is answered
        self._next: dict[RequestKey, _Question] = {}
        self._callers: dict[Caller, _Question] = {}
        self._answered: OrderedDict[Caller, bytes] = OrderedDict()
        # by key: when it was cached, and the value
        self._kept: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        # Sent at once, because the coordinator closes connections that send nothing: ranks connect only after importing
        # torch.
        self._outgoing.append((OWN, pack(Op.HELLO, self._number, pack_number(VERSION))))

    # These methods handle messages from the ranks.

    def receive_requests(self, route: bytes, frame: bytes) -> None:
        """Accept a frame from the process behind `route`."""
        try:
            messages = unpack(frame)
        except WireError:
            self._outgoing.append((route, frame))  # the coordinator handles malformed frames
            return
        rest = [message for message in messages if message.what not in _SHARED or not self._share(route, message)]
        if len(rest) == len(messages):
            self._outgoing.append((route, frame))
        elif rest:
            self._outgoing.append((route, b"".join(pack(what, number, *fields) for what, number, fields in rest)))

    def _share(self, route: bytes, message: WireMessage) -> bool:
        """Answer a request here, or share it among ranks; return False if it must be sent in the rank's own name."""
        what, number, fields = message
        caller = route, number
        if what == Op.CANCEL:
            return len(fields) == 1 and self._cancel(route, fields[0])
        if caller in self._callers:  # the rank has repeated a request that waits
            self._answer(caller, pack(AnswerStatus.PARKED, number))
        elif what == Op.HELLO:
            if not self._hello or fields != [pack_number(VERSION)]:
                return False
            self._answer(caller, pack(AnswerStatus.OK, number, *self._hello))
        elif what in (Op.GET, Op.WAIT):
            if len(fields) != 1 or not fields[0].endswith(_ONCE):
                return False
            self._get_once(caller, what, fields[0])
        elif what == Op.CHECK and len(fields) == 1 and fields[0] in self._kept:
            self._answer(caller, pack(AnswerStatus.OK, number, b"1"))
        elif what in (Op.CHECK, Op.MULTI_GET):
            self._ask(caller, (int(what), *fields), what, fields)
        elif what == Op.COMPARE_SET:
            if len(fields) != 3 or fields[1] != fields[2]:
                return False  # a change is made in the rank's own name
            self._ask(caller, (int(what), *fields), what, fields)
        else:
            return self._add_items(caller, fields)
        return True

    def _get_once(self, caller: Caller, what: int, key: bytes) -> None:
        found = self._kept.get(key)
        if found is not None:
            self._answer(caller, pack(AnswerStatus.OK, caller[1], *([found[1]] if what == Op.GET else [])))
            return
        words: RequestKey = (int(Op.GET), key)
        question = self._current.get(words)
        if question is None:
            self._ask(caller, words, Op.GET, [key], asked=what)
        else:  # even if the coordinator has already answered: the value never changes
            question.callers[caller] = what, 0
            self._callers[caller] = question

    def _add_items(self, caller: Caller, fields: list[bytes]) -> bool:
        if len(fields) < 3:
            return False
        if (answered := self._answered.get(caller)) is not None:  # the rank has not received the answer
            self._answer(caller, answered)
            return True
        words: RequestKey = (int(Op.ADD_ITEMS), *fields[:2])
        size = _size(fields[2:])
        current = self._current.get(words)
        waiting = self._next.get(words) if current is not None and current.is_sent else current
        if size > _MAX_ITEMS_BYTES or (waiting is not None and waiting.num_bytes + size > _MAX_ITEMS_BYTES):
            return False
        self._ask(caller, words, Op.ADD_ITEMS, fields)
        return True

    def _ask(
        self, caller: Caller, words: RequestKey, what: int, fields: list[bytes], *, asked: int | None = None
    ) -> None:
        """Add the caller to the unsent question with these words, or to a new one."""
        current = self._current.get(words)
        question = self._next.get(words) if current is not None and current.is_sent else current
        if question is None:
            question = _Question(words, what, fields[:2] if what == Op.ADD_ITEMS else fields)
            if current is None:
                self._begin(question)
            else:
                self._next[words] = question
        at = len(question.fields) - 2
        if what == Op.ADD_ITEMS:
            question.fields += fields[2:]
            question.num_bytes += _size(fields[2:])
        question.callers[caller] = (what if asked is None else asked), at
        self._callers[caller] = question

    def _begin(self, question: _Question) -> None:
        self._number += 1
        question.number = self._number
        self._under_way[question.number] = self._current[question.words] = question
        self._to_ask.append(question)

    def _cancel(self, route: bytes, number: bytes) -> bool:
        """Cancel a request if it was shared here; return whether it was."""
        try:
            caller = route, unpack_number(number)
        except WireError:
            return False
        if caller not in self._callers:
            return False
        self._drop_caller(caller)
        return True

    def drop(self, route: bytes) -> None:
        """Forget the requests of a process that has ended."""
        for caller in [caller for caller in self._callers if caller[0] == route]:
            self._drop_caller(caller)

    def _drop_caller(self, caller: Caller) -> None:
        """Remove a caller from its question; cancel a question that can wait and that has no other callers."""
        question = self._callers.pop(caller)
        del question.callers[caller]
        if question.what in _WAITING and not question.callers and question.number in self._under_way:
            self._end(question)
            self._outgoing.append((OWN, pack(Op.CANCEL, 0, pack_number(question.number))))
            self._begin_next(question.words)

    def ask_again(self, now: float) -> None:
        """Repeat questions that were not answered for some time, and drop values that were cached for `KEPT_S`.

        The callers are notified that their requests still wait. Only a failed notification shows that a caller has
        ended: then call `drop`.
        """
        for question in self._under_way.values():
            if not question.is_to_be_sent and now >= question.ask_again_at:
                question.is_to_be_sent = True
                self._to_ask.append(question)
                for caller in question.callers:
                    self._answer(caller, pack(AnswerStatus.PARKED, caller[1]))
        while self._kept and now - next(iter(self._kept.values()))[0] > KEPT_S:
            self._kept.popitem(last=False)

    def resume(self) -> None:
        """Make the next `ask_again` repeat all questions in flight, because they may be lost."""
        for question in self._under_way.values():
            question.asked_at, question.num_asked, question.is_parked = -math.inf, 0, False

    def restart(self) -> None:
        """Drop cached values: another coordinator has taken over, which may have other keys."""
        self._kept.clear()
        self._hello = []

    # These methods handle messages from the coordinator.

    def receive_answers(self, frame: bytes, now: float) -> None:
        """Accept a frame from the coordinator.

        Raises:
            WireError: the frame is malformed.
        """
        for status, _, fields in unpack(frame):
            if status != AnswerStatus.RELAYED:
                continue
            for route, answers in zip(fields[::2], fields[1::2], strict=True):
                if route != OWN:
                    self._answers.append((route, answers))
                    continue
                for message in unpack(answers):
                    self._process_answer(message, now)

    def _process_answer(self, message: WireMessage, now: float) -> None:
        status, number, fields = message
        if number == 1 and status == AnswerStatus.OK:
            self._hello = fields
        question = self._under_way.get(number)
        if question is None:
            return
        if status == AnswerStatus.PARKED:
            question.is_parked = True
            return
        self._end(question)
        if question.what == Op.GET and status == AnswerStatus.OK:
            self._kept[question.fields[0]] = now, fields[0]
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        for caller, (what, at) in question.callers.items():
            del self._callers[caller]
            theirs = fields
            if status == AnswerStatus.OK and what == Op.WAIT:
                theirs = []
            elif status == AnswerStatus.OK and what == Op.ADD_ITEMS:
                theirs = [pack_number(unpack_number(fields[0]) + at)]
            answer = pack(status, caller[1], *theirs)
            if what == Op.ADD_ITEMS:
                self._answered[caller] = answer
                if len(self._answered) > _MAX_ANSWERED:
                    self._answered.popitem(last=False)
            self._answer(caller, answer)
        self._begin_next(question.words)

    def _begin_next(self, words: RequestKey) -> None:
        """Send the next question with these words, if a caller still waits for it."""
        following = self._next.pop(words, None)
        if following is not None and following.callers:
            self._begin(following)

    def _end(self, question: _Question) -> None:
        self._under_way.pop(question.number, None)
        if self._current.get(question.words) is question:
            del self._current[question.words]

    def _answer(self, caller: Caller, answer: bytes) -> None:
        self._answers.append((caller[0], answer))

    # These methods return messages to send.

    def pop_answers(self) -> list[tuple[bytes, bytes]]:
        """Return the answers to send, each with the route of its process."""
        answers, self._answers = self._answers, []
        return answers

    def pop_outgoing(self, now: float) -> list[bytes]:
        """Return the messages to send to the coordinator now, as few as the limits allow."""
        outgoing, self._outgoing = self._outgoing, []
        questions, self._to_ask = self._to_ask, []
        for question in questions:
            if question.number in self._under_way:  # otherwise it was cancelled meanwhile
                question.is_sent, question.is_to_be_sent = True, False
                question.asked_at, question.num_asked = now, question.num_asked + 1
                outgoing.append((OWN, pack(question.what, question.number, *question.fields)))
        return list(_combine(outgoing))


def _size(items: list[bytes]) -> int:
    return sum(max(len(item), _ITEM_BYTES) for item in items)


def _combine(outgoing: list[tuple[bytes, bytes]]) -> Iterable[bytes]:
    fields: list[bytes] = []
    size = 0
    for route, frame in outgoing:
        if fields and (size + len(frame) > MAX_FRAME_BYTES or len(fields) >= 2 * MAX_MESSAGES):
            yield pack(Op.RELAY, 0, *fields)
            fields, size = [], 0
        fields += (route, frame)
        size += len(frame)
    if fields:
        yield pack(Op.RELAY, 0, *fields)
