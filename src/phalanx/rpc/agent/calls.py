"""Track the calls that wait for an answer: their futures, their timeouts, and how many there may be."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from phalanx.errors import ClosedError, DeadlineError, PeerLostError
from phalanx.rpc.agent import interrupts
from phalanx.rpc.agent.answer import Answer, LineAnswer
from phalanx.rpc.worker_info import WorkerAddress

_BIG_BYTES = 1 << 16  # calls of so many bytes count towards the bytes under way


class Call:
    """A `Call` was sent, or is about to be. `kept` lives until it is answered."""

    __slots__ = (
        "deadline", "future", "kept", "line_answer", "name", "nbytes", "number", "on_answer", "peer", "read",
        "timeout_s", "what",
    )  # fmt: skip

    def __init__(self, what: str, name: str, timeout_s: float, kept: Any = None) -> None:
        self.what = what  # such as "rpc_async"
        self.name = name  # the name of the function
        self.timeout_s = timeout_s
        self.deadline = math.inf
        self.line_answer: LineAnswer | None = None  # if it goes over a line
        self.future: Answer[Any] | None = None  # otherwise
        self.peer: Callee
        self.kept = kept
        self.nbytes = 0
        self.number = 0
        self.on_answer: Any = None  # it makes the result of what has arrived, before the future has it
        self.read: Callable[[Any], Any] | None = None  # it makes the result of the answer's frame, which is no pickle

    def fail(self, make: Callable[[], BaseException]) -> None:
        """Set an error, which `make` returns, instead of an answer."""
        self.answer.fail(make)

    @property
    def answer(self) -> Answer[Any] | LineAnswer:
        """Return what the caller waits for."""
        found = self.line_answer or self.future
        assert found is not None
        return found

    def take(self) -> bool:
        """Take the call from those under way; return False if another thread has."""
        return self.peer.take(self.number) is not None

    @property
    def described(self) -> tuple[str, str, float]:
        return self.what, self.name, self.timeout_s


class Callee:
    """`Callee` is a worker that this one calls: it has the calls that the worker has yet to answer."""

    def __init__(self, member: WorkerAddress, most_calls: int, most_bytes: int) -> None:
        self.member = member
        self.calls: dict[int, Call] = {}
        self.connection: Any = None
        self.calls_us: Any = None  # the connection on which it calls us
        self.connecting = threading.Lock()
        self.lost = ""  # why it will not answer any more
        self._most_calls = most_calls
        self._most_bytes = most_bytes
        self._nbytes = 0
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._num_waiting = 0

    def is_lost(self) -> bool:
        """Return whether the worker will not answer any more."""
        return bool(self.lost)

    def add(self, call: Call, nbytes: int, *, waits: bool) -> None:
        """Count a call as under way. With `waits`, wait while too many are, as all calls of the user's do.

        Raises:
            DeadlineError: there was no room for it in time; it was not sent.
        """
        call.number, call.peer = next(_numbers), self
        if call.timeout_s:
            call.deadline = time.monotonic() + call.timeout_s
        if waits and (nbytes >= _BIG_BYTES or len(self.calls) >= self._most_calls):
            self._wait_for_room(call, nbytes)
        self.calls[call.number] = call

    def _wait_for_room(self, call: Call, nbytes: int) -> None:
        with self._lock:
            self._num_waiting += 1
            try:
                while not self.lost and (
                    len(self.calls) >= self._most_calls or (self._nbytes and self._nbytes + nbytes > self._most_bytes)
                ):
                    left = call.deadline - time.monotonic()
                    if left <= 0:
                        raise DeadlineError(
                            f"{call.what}({call.name}) to {self.member}: {len(self.calls)} calls with {self._nbytes} "
                            f"bytes of tensors are under way, and none was answered within {call.timeout_s:.1f} s; "
                            "this one was not sent."
                        )
                    self._room.wait(min(left, 1.0))
                    interrupts.check()
            finally:
                self._num_waiting -= 1
            if nbytes >= _BIG_BYTES:
                call.nbytes = nbytes
                self._nbytes += nbytes

    def take(self, number: int) -> Call | None:
        """Return the call with this number, and forget it; None if it is not waiting, or not any more."""
        call = self.calls.pop(number, None)
        if call is not None and (call.nbytes or self._num_waiting):
            with self._lock:
                self._nbytes -= call.nbytes
                self._room.notify_all()
        return call

    def take_all(self) -> list[Call]:
        """Return all calls, and forget them. A lost worker also frees its table, which has grown with them."""
        taken = [call for number in list(self.calls) if (call := self.take(number)) is not None]
        if self.lost:
            old, self.calls = self.calls, {}
            taken += old.values()  # a thread that adds a call now finds the worker lost, and takes the call back
        return taken

    def expire(self, now: float) -> tuple[list[Call], float]:
        """Return the calls that have waited too long, and when the next one will have."""
        late, due = [], math.inf
        for number, call in list(self.calls.items()):
            if call.deadline <= now:
                if self.take(number) is not None:
                    late.append(call)
            elif call.deadline < due:
                due = call.deadline
        return late, due


_numbers = itertools.count(1)


def describe_timeout(what: str, name: str, timeout_s: float, member: WorkerAddress) -> DeadlineError:
    """Return the error of a call that has waited too long."""
    return DeadlineError(
        f"{what}({name}) to {member}: RPC ran for more than set timeout ({timeout_s * 1000:.0f} ms). "
        "The function may still be running there, and its result will be dropped. Give the call (timeout=) or "
        "the worker (rpc_timeout of its options) more seconds, or 0 for no limit.",
        missing=(member.info.id,),
    )


def why_failed(peer: Callee, call: Call) -> Callable[[], BaseException]:
    """Return what makes the error of a call to a worker that is lost, or that this worker, shut down, won't hear."""
    if not peer.lost:
        text = f"{call.what}({call.name}) to {peer.member}: this worker was shut down before the answer came."
        return partial(ClosedError, text)
    text = f"{call.what}({call.name}) to {peer.member}: the worker is lost: {peer.lost}"
    if call.number:
        text += "\nWhether the function ran there is not known."
    return partial(PeerLostError, text, ranks=(peer.member.info.id,))


def count(peers: Iterable[Callee]) -> int:
    """Return how many calls wait for an answer."""
    return sum(len(peer.calls) for peer in peers)
