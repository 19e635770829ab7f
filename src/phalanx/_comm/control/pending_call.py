"""A `PendingCall` is a request under way: who waits for it, and what came back."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from phalanx._comm.control.wire import MAX_FRAME_BYTES, AnswerStatus, pack
from phalanx.errors import CoordinationError

Request = tuple[int, Sequence[bytes]]  # an `Op` and its fields

_RESEND_S, _MOST_DOUBLINGS = 3.0, 3
RESEND_PARKED_S = 20.0  # the coordinator lets go of what a client that says nothing for a minute waits for


def resend_after(num_sent: int, *, is_parked: bool) -> float:
    """Return after how many seconds to repeat a request that was sent `num_sent` times and not answered.

    The pauses grow: a coordinator that thousands ask at once answers late, and each request that is sent again makes it
    later. If the request is parked, the coordinator has said that it has it.
    """
    if is_parked:
        return RESEND_PARKED_S
    return _RESEND_S * 2.0 ** min(max(num_sent - 1, 0), _MOST_DOUBLINGS)


class PendingCall:
    """A `PendingCall` is a request of kind `what` under way. The connection's lock guards all but reading `is_over`."""

    __slots__ = ("answer", "error", "fields", "is_parked", "message", "num_sent", "number", "sent_at", "wake", "what")

    def __init__(self, number: int, what: int, message: bytes) -> None:
        self.number = number
        self.what = what
        self.message = message
        self.sent_at = 0.0
        self.num_sent = 0  # how often it was sent since the connection was made
        self.is_parked = False  # the coordinator has said that it has the request, and that it waits there
        self.answer: int | None = None
        self.fields: list[bytes] = []
        self.error: Exception | None = None
        self.wake: threading.Lock | None = None  # the thread that waits for the answer holds it while it sleeps

    @property
    def is_over(self) -> bool:
        """Return whether it was answered, or has failed."""
        return self.answer is not None or self.error is not None

    @property
    def resend_at(self) -> float:
        """Return when to repeat the request if it was not answered by then."""
        return self.sent_at + resend_after(self.num_sent, is_parked=self.is_parked)

    def note_sent(self, now: float) -> None:
        """Note that the request was sent, for the first time or again."""
        self.sent_at = now
        self.num_sent += 1

    def result(self, where: str) -> list[bytes]:
        """Return the fields of the answer, which has come from `where`.

        Raises:
            CoordinationError: the connection has failed, or the coordinator does not know us any more.
            ValueError: it refuses the request.
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
    """Return a call for each request, numbered from `first`, whose messages together make one frame.

    Raises:
        ValueError: they are too long for a frame.
    """
    calls = [
        PendingCall(number, what, pack(what, number, *fields)) for number, (what, fields) in enumerate(requests, first)
    ]
    size = sum(len(call.message) for call in calls)
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a request of {size} bytes; the longest may have {MAX_FRAME_BYTES}")
    return calls
