"""A `ClientSession` is the coordinator's record of one client.

A session survives all reconnections of its client. A client repeats a request until it is answered; the session keeps
the last answers, so that a change is made only once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx._comm.control.wire import MAX_VALUE_BYTES, AnswerStatus, pack_head
from phalanx._job.coordinator.key_value import Waiter
from phalanx._job.coordinator.membership import Member

MAX_ANSWERS = 1024  # per session; a client never has even half as many changes in flight
MAX_ANSWER_BYTES = 4 * MAX_VALUE_BYTES
MAX_POPPED, MAX_POPPED_BYTES = 512, 5 * MAX_VALUE_BYTES  # more than can be in flight to a client


class SharedAnswer:
    """A `SharedAnswer` is an answer with one field. It does not copy `value`, which many sessions may receive."""

    __slots__ = ("parts",)

    def __init__(self, status: AnswerStatus, number: int, value: bytes) -> None:
        self.parts = pack_head(status, number, (len(value),)), value

    def __len__(self) -> int:
        return len(self.parts[0]) + len(self.parts[1])


Answer = bytes | SharedAnswer


def split_answers(answers: Iterable[Answer]) -> Iterator[bytes]:
    """Yield the parts of the answers, in the order in which they are sent."""
    for answer in answers:
        if isinstance(answer, SharedAnswer):
            yield from answer.parts
        else:
            yield answer


THIS_HOST, OTHER_HOSTS = 0, 1  # the coordinator's listeners


class DirectRoute(NamedTuple):
    """A `DirectRoute` leads to a client that is connected to one of the coordinator's listeners."""

    listener: int
    identity: bytes


class RelayedRoute(NamedTuple):
    """A `RelayedRoute` leads to a client that is connected to a relay."""

    relay: DirectRoute
    route: bytes


Route = DirectRoute | RelayedRoute


@dataclass(eq=False)
class ClientSession:
    """A `ClientSession` is the coordinator's record of one client. `route` is the address for the service's answers."""

    route: Route
    received_at: float
    member: Member | None = None
    gone: str = ""  # why the client is no longer a member
    relay_owner: int = -1  # if this client is a relay: the member that owns it
    newest: int = 0  # the highest number of a request that has changed something
    parked: dict[int, Waiter] = field(default_factory=dict)
    num_parked_keys: int = 0
    outgoing: list[Answer] = field(default_factory=list)
    outgoing_bytes: int = 0
    # by number of a recent request: the queue and the item that it has popped
    popped: OrderedDict[int, tuple[bytes, bytes]] = field(default_factory=OrderedDict)
    popped_bytes: int = 0
    _answers: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    _answer_bytes: int = 0

    def answered(self, number: int) -> bytes | None:
        """Return the earlier answer to this request; None if there is none."""
        return self._answers.get(number)

    def answers(self) -> Iterator[tuple[int, bytes]]:
        """Yield the remembered answers, each after the number of its request."""
        yield from self._answers.items()

    def remember(self, number: int, answer: bytes) -> None:
        """Keep an answer, which is sent again if the request is repeated."""
        self._answers[number] = answer
        self.newest = max(self.newest, number)
        self._answer_bytes += len(answer)
        while len(self._answers) > MAX_ANSWERS or (self._answer_bytes > MAX_ANSWER_BYTES and len(self._answers) > 1):
            self._answer_bytes -= len(self._answers.popitem(last=False)[1])

    def record_popped(self, number: int, queue: bytes, item: bytes) -> None:
        """Record the item that a request has popped: another client receives the item if this client does not."""
        self.popped[number] = queue, item
        self.popped_bytes += len(item)
        while len(self.popped) > MAX_POPPED or (self.popped_bytes > MAX_POPPED_BYTES and len(self.popped) > 1):
            self.popped_bytes -= len(self.popped.popitem(last=False)[1][1])

    def withdraw_item(self, number: int) -> tuple[bytes, bytes] | None:
        """Remove and return the queue and item that a request has popped; None if the request has popped none."""
        found = self.popped.pop(number, None)
        if found is not None:
            self.popped_bytes -= len(found[1])
        return found

    def forget_answer(self, number: int) -> None:
        """Forget an answer that never reached the client and is no longer true."""
        answer = self._answers.pop(number, None)
        if answer is not None:
            self._answer_bytes -= len(answer)
