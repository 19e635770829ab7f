"""A `PendingCall` is a request that was sent to the coordinator, and later its answer or error."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from phalanx._comm.control.wire import MAX_FRAME_BYTES, AnswerStatus, pack
from phalanx.errors import CoordinationError

Request = tuple[int, Sequence[bytes]]  # an `Op` and its fields

_RESEND_S, _MOST_DOUBLINGS = 3.0, 3
RESEND_PARKED_S = 20.0  # the coordinator drops the requests of a client that is silent for a minute


def resend_after(num_sent: int, *, is_parked: bool) -> float:
    """Return the seconds after which to repeat an unanswered request that was sent `num_sent` times.

    The interval doubles up to eight times its initial value: a coordinator with thousands of clients answers late, and
    each repeated request adds to its load. A parked request is one whose arrival the coordinator has confirmed.
    """
    if is_parked:
        return RESEND_PARKED_S
    return _RESEND_S * 2.0 ** min(max(num_sent - 1, 0), _MOST_DOUBLINGS)


class PendingCall:
    """A `PendingCall` is a pending request of kind `what`. The connection's lock guards it; `is_over` needs no lock."""

    __slots__ = ("answer", "error", "fields", "is_parked", "message", "num_sent", "number", "sent_at", "wake", "what")

    def __init__(self, number: int, what: int, message: bytes) -> None:
        self.number = number
        self.what = what
        self.message = message
        self.sent_at = 0.0
        self.num_sent = 0  # times sent since the connection was established
        self.is_parked = False  # the coordinator has confirmed that the request waits there
        self.answer: int | None = None
        self.fields: list[bytes] = []
        self.error: Exception | None = None
        self.wake: threading.Lock | None = None  # held by the thread that waits for the answer, while it sleeps

    @property
    def is_over(self) -> bool:
        """Return whether the request was answered or has failed."""
        return self.answer is not None or self.error is not None

    @property
    def resend_at(self) -> float:
        """Return when to repeat the request if it is unanswered by then."""
        return self.sent_at + resend_after(self.num_sent, is_parked=self.is_parked)

    def note_sent(self, now: float) -> None:
        """Record that the request was sent."""
        self.sent_at = now
        self.num_sent += 1

    def result(self, where: str) -> list[bytes]:
        """Return the fields of the answer; none if there is no value, [b"busy"] if a receiver's outbox is full.

        Raises:
            CoordinationError: the connection failed, or the coordinator does not count this process as a member.
            AuthenticationError: the coordinator has a different key.
            ClosedError: the client was closed.
            ValueError: the coordinator refused the request.
        """
        if self.error is not None:
            raise self.error
        if self.answer == AnswerStatus.OK:
            return self.fields
        if self.answer == AnswerStatus.EMPTY:
            return []
        if self.answer == AnswerStatus.BUSY:
            return [b"busy"]
        said = self.fields[0].decode(errors="replace") if self.fields else ""
        if self.answer == AnswerStatus.UNKNOWN:
            raise CoordinationError(f"{where} does not count this process as a member: {said}.", reason="expelled")
        raise ValueError(said)


def pack_calls(requests: Sequence[Request], first: int) -> list[PendingCall]:
    """Return a call for each request, numbered from `first`; their messages together form one frame.

    Raises:
        ValueError: the messages together are too long for a frame.
    """
    calls = [
        PendingCall(number, what, pack(what, number, *fields)) for number, (what, fields) in enumerate(requests, first)
    ]
    size = sum(len(call.message) for call in calls)
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a request has {size} bytes, but at most {MAX_FRAME_BYTES} are allowed")
    return calls
