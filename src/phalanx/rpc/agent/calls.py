"""Track the calls that wait for an answer: their futures, their timeouts, and their number."""

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

_BIG_BYTES = 1 << 16  # smaller calls do not count towards the bytes in flight


class Call:
    """A `Call` is an outgoing call, created before it is sent. It keeps `kept` alive until the answer arrives."""

    __slots__ = (
        "deadline", "future", "kept", "line_answer", "name", "nbytes", "number", "on_answer", "peer", "read",
        "timeout_s", "what",
    )  # fmt: skip

    def __init__(self, what: str, name: str, timeout_s: float, kept: Any = None) -> None:
        self.what = what  # such as "rpc_async"
        self.name = name  # the name of the function
        self.timeout_s = timeout_s
        self.deadline = math.inf
        self.line_answer: LineAnswer | None = None  # for a call over a line
        self.future: Answer[Any] | None = None  # for a call over the connection
        self.peer: Callee
        self.kept = kept
        self.nbytes = 0
        self.number = 0
        self.on_answer: Any = None  # converts the answer to the result of the future
        self.read: Callable[[Any], Any] | None = None  # decodes the frame of an answer that is not pickled

    def fail(self, make: Callable[[], BaseException]) -> None:
        """Set the error that `make` returns instead of an answer."""
        self.answer.fail(make)

    @property
    def answer(self) -> Answer[Any] | LineAnswer:
        """Return the future, or the line's answer, for which the caller waits."""
        found = self.line_answer or self.future
        assert found is not None
        return found

    def claim(self) -> bool:
        """Claim the right to complete the call; return False if another thread has claimed it."""
        return self.peer.remove(self.number) is not None

    @property
    def described(self) -> tuple[str, str, float]:
        return self.what, self.name, self.timeout_s


class Callee:
    """A `Callee` is a worker that this worker calls, and the calls that the callee has not answered yet.

    There is no connection before the first call, and none once the callee is lost.
    """

    def __init__(self, member: WorkerAddress, most_calls: int, most_bytes: int) -> None:
        self.member = member
        self.calls: dict[int, Call] = {}
        self.connection: Any = None
        self.calls_us: Any = None  # the connection over which the callee calls this worker
        self.connecting = threading.Lock()
        self.lost = ""  # why the callee is lost; empty while it is not
        self._most_calls = most_calls
        self._most_bytes = most_bytes
        self._nbytes = 0
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._num_waiting = 0

    def is_lost(self) -> bool:
        """Return whether the worker is lost."""
        return bool(self.lost)

    def add(self, call: Call, nbytes: int, *, waits: bool) -> None:
        """Register a call as in flight. With `waits` (the user's calls), first wait while too many are in flight.

        Raises:
            DeadlineError: too many calls were in flight until the call's timeout passed; the call was not sent.
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
                            f"bytes of tensors are in flight, and none was answered within {call.timeout_s:.1f} s; "
                            "this one was not sent."
                        )
                    self._room.wait(min(left, 1.0))
                    interrupts.check()
            finally:
                self._num_waiting -= 1
            if nbytes >= _BIG_BYTES:
                call.nbytes = nbytes
                self._nbytes += nbytes

    def remove(self, number: int) -> Call | None:
        """Remove the call with this number and return it; None if no such call waits."""
        call = self.calls.pop(number, None)
        if call is not None and (call.nbytes or self._num_waiting):
            with self._lock:
                self._nbytes -= call.nbytes
                self._room.notify_all()
        return call

    def remove_all(self) -> list[Call]:
        """Remove all calls and return them. For a lost worker, also free the table, whose size never shrinks."""
        removed = [call for number in list(self.calls) if (call := self.remove(number)) is not None]
        if self.lost:
            old, self.calls = self.calls, {}
            removed += old.values()  # a thread that adds a call now finds the worker lost, and removes the call
        return removed

    def expire(self, now: float) -> tuple[list[Call], float]:
        """Remove and return the calls that have timed out; also return the earliest deadline of the others."""
        late, due = [], math.inf
        for number, call in list(self.calls.items()):
            if call.deadline <= now:
                if self.remove(number) is not None:
                    late.append(call)
            elif call.deadline < due:
                due = call.deadline
        return late, due


_numbers = itertools.count(1)


def describe_timeout(what: str, name: str, timeout_s: float, member: WorkerAddress) -> DeadlineError:
    """Return the error of a call that has timed out."""
    return DeadlineError(
        f"{what}({name}) to {member}: RPC ran for more than set timeout ({timeout_s * 1000:.0f} ms). "
        "The function may still be running there, and its result will be dropped. Give the call (timeout=) or "
        "the worker (rpc_timeout of its options) more seconds, or 0 for no limit.",
        missing=(member.info.id,),
    )


def why_failed(peer: Callee, call: Call) -> Callable[[], BaseException]:
    """Return a function that makes the error of a call whose callee is lost, or whose caller was shut down."""
    if not peer.lost:
        text = f"{call.what}({call.name}) to {peer.member}: this worker was shut down before the answer came."
        return partial(ClosedError, text)
    if call.what in ("RRef.to_here", "RRef._get_type"):  # no function of the user runs
        return partial(owner_lost, peer)
    text = f"{call.what}({call.name}) to {peer.member}: the worker is lost: {peer.lost}"
    if call.number:
        text += "\nThe function may have run there, or not."
    return partial(PeerLostError, text, ranks=(peer.member.info.id,))


def owner_lost(owner: Callee) -> PeerLostError:
    """Return the error of an RRef whose owner is lost, before or during a call."""
    return PeerLostError(
        f"RRef of {owner.member}: the owner is lost: {owner.lost} The object is lost with it.",
        ranks=(owner.member.info.id,),
    )


def count(peers: Iterable[Callee]) -> int:
    """Return how many calls wait for an answer."""
    return sum(len(peer.calls) for peer in peers)
