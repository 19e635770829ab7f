"""One client of the coordinator, as that sees it.

A session is one connection of a client, through all its reconnections. A client sends a request again when no answer
came; one that changes something is done once, since the session remembers its last answers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.coordination.key_value import Waiter
from phalanx.coordination.membership import Member
from phalanx.coordination.wire import MAX_VALUE_BYTES

MAX_ANSWERS = 1024  # kept per session; a client never has half as many requests under way that change something
MAX_ANSWER_BYTES = 4 * MAX_VALUE_BYTES

Answer = bytes


class Relayed(NamedTuple):
    """The way to a client on the host of a relay."""

    relay: Any
    route: bytes


@dataclass(eq=False)
class Session:
    """One client. `route` is what the service needs in order to answer it."""

    route: Any
    heard_at: float
    member: Member | None = None
    gone: str = ""  # why it is no member any more
    parked: dict[int, Waiter] = field(default_factory=dict)
    num_parked_keys: int = 0
    outgoing: list[Answer] = field(default_factory=list)
    outgoing_bytes: int = 0
    popped: OrderedDict[int, tuple[bytes, bytes]] = field(default_factory=OrderedDict)  # queue and item, of late
    num_unsent_pops: int = 0  # how many of them are among `outgoing`
    _answers: OrderedDict[int, Answer] = field(default_factory=OrderedDict)
    _answer_bytes: int = 0

    def answered(self, number: int) -> Answer | None:
        """Return what was answered to this request already."""
        return self._answers.get(number)

    def remember(self, number: int, answer: Answer) -> None:
        """Give the same answer if the request comes again."""
        self._answers[number] = answer
        self._answer_bytes += len(answer)
        while len(self._answers) > MAX_ANSWERS or (self._answer_bytes > MAX_ANSWER_BYTES and len(self._answers) > 1):
            self._answer_bytes -= len(self._answers.popitem(last=False)[1])

    def unanswer(self, number: int) -> None:
        """Forget an answer that never reached the client, and is not true any more."""
        answer = self._answers.pop(number, None)
        if answer is not None:
            self._answer_bytes -= len(answer)
