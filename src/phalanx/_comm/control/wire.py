"""Pack and unpack the messages between clients and the coordinator. A frame holds one or more messages:

    fields (u16) · what (u8) · number (u64) · length of each field (u32) · the fields

`fields` is the number of fields, which are byte strings. `what` is an `Op` in a request, an `AnswerStatus` in an answer
or event. `number` is that of the request, also in its answer, or that of the event. All integers are little-endian.
Received bytes are never unpickled or evaluated, and each length is checked before memory is allocated for it.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence, Sized
from typing import NamedTuple, TypeVar

VERSION = 6
MAX_VALUE_BYTES = 8 << 20  # TCPStore has the same limit
MAX_FRAME_BYTES = MAX_VALUE_BYTES + (1 << 20)
MAX_MESSAGES = 256  # the maximum per frame; the coordinator handles a whole frame before the next client's
MAX_FIELDS = 0xFFFF
MAX_ENVELOPE_BYTES = MAX_FRAME_BYTES + (64 << 10)  # for several frames that a relay forwards together
WRITE_ONCE = "#once"
"""A key with this suffix is set once and never changes, so a host's relay requests it once for all its ranks."""

# what parsing a malformed message may raise; the message is then ignored
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)

_HEAD = struct.Struct("<HBQ")
_FIELD_BYTES = 4
M = TypeVar("M", bound=Sized)
KIND = slice(2, 3)  # the position of the first message's kind in a frame


class Op(enum.IntEnum):
    """The kind of a client's request to the coordinator."""

    HELLO = 1
    SET = 2
    GET = 3
    ADD = 4
    COMPARE_SET = 5
    APPEND = 6
    CHECK = 7
    WAIT = 8
    DELETE = 9
    NUM_KEYS = 10
    MULTI_GET = 11
    MULTI_SET = 12
    QUEUE_PUSH = 13
    QUEUE_POP = 14
    QUEUE_LEN = 15
    LIST_KEYS = 16
    DELETE_PREFIX = 17
    CANCEL = 18
    JOIN = 19
    LEAVE = 20
    HEARTBEAT = 21
    MEMBERS = 22
    POST = 23
    BARRIER = 26
    RELAY = 27  # from a relay: frames from processes on its host
    UNDELIVERED = 28  # from a relay: answers that a process on its host did not receive
    ADD_ITEMS = 29  # set numbered keys to these values, and add the number of values to the counter
    FOLLOW = 30  # from a standby: send the whole state, and every later change
    FOLLOWED = 31  # from a standby: the last batch of changes received
    DATAGRAM = 32  # an unreliable message to a member: it may be lost
    RELAY_OWNER = 33  # from a relay: the member that opened it; the relay and its clients are lost with that member


class AnswerStatus(enum.IntEnum):
    """The kind of a message to a client: the status of an answer, or an unrequested message."""

    OK = 0
    WRONG_CALL = 1  # the caller's error: a value is not a number, or a limit is exceeded
    EMPTY = 2  # there is no value, and the caller asked not to wait
    BUSY = 3  # the receiver's outbox is full: try again
    UNKNOWN = 4  # this process is not a member, or is no longer one
    EVENT = 5  # unrequested: an event
    HEARTBEAT = 6
    PARKED = 7  # not an answer: the coordinator already has this request, which waits there
    RELAYED = 8  # to a relay: frames for the processes on its host
    CUT = 9  # from a relay: it has lost the coordinator for now
    RESUMED = 10  # from a relay: it has reached the coordinator again; messages sent meanwhile may be lost
    JOURNAL = 11  # to a standby: a part of the state, or a change
    DATAGRAM = 12  # unrequested: an unreliable message from a member


class WireMessage(NamedTuple):
    """One message of a frame."""

    what: int
    number: int
    fields: list[bytes]


class WireError(ValueError):
    """A frame is malformed."""


def pack(what: int, number: int, *fields: bytes) -> bytes:
    """Return the bytes of one message; a frame is the concatenation of messages."""
    n = len(fields)
    if n == 1:
        (field,) = fields
        return _ONE.pack(1, what, number, len(field)) + field
    return b"".join((_HEAD.pack(n, what, number), struct.pack(f"<{n}I", *map(len, fields)), *fields))


_ONE = struct.Struct("<HBQI")


def pack_head(what: int, number: int, sizes: Sequence[int]) -> bytes:
    """Return the header of a message whose fields have the given sizes in bytes."""
    return _HEAD.pack(len(sizes), what, number) + struct.pack(f"<{len(sizes)}I", *sizes)


def unpack(frame: bytes, max_fields: int | None = None) -> list[WireMessage]:
    """Return the messages of a frame.

    Raises:
        WireError: the frame is malformed, or has more than MAX_MESSAGES messages or `max_fields` fields in all.
    """
    messages: list[WireMessage] = []
    at, end, num_fields = 0, len(frame), 0
    while at < end:
        if end - at < _HEAD.size or len(messages) == MAX_MESSAGES:
            raise WireError(f"{end - at} bytes after {len(messages)} messages")
        n, what, number = _HEAD.unpack_from(frame, at)
        at += _HEAD.size
        num_fields += n
        if end - at < n * _FIELD_BYTES or (max_fields is not None and num_fields > max_fields):
            raise WireError(f"{n} fields, and {end - at} bytes")
        lengths = struct.unpack_from(f"<{n}I", frame, at)
        at += n * _FIELD_BYTES
        if sum(lengths) > end - at:
            raise WireError(f"fields of {sum(lengths)} bytes, and {end - at} bytes")
        fields = []
        for length in lengths:
            fields.append(frame[at : at + length])
            at += length
        messages.append(WireMessage(what, number, fields))
    return messages


def pack_number(value: int) -> bytes:
    """Return a field with an integer in decimal."""
    return b"%d" % value


def unpack_number(field: bytes) -> int:
    """Return the integer in a field.

    Raises:
        WireError: the field is not a signed 64-bit integer in decimal.
    """
    if len(field) > 20:
        raise WireError("a number of more than 20 digits")
    try:
        value = int(field)
    except ValueError:
        raise WireError("not a number") from None
    if not -(1 << 63) <= value < 1 << 63:
        raise WireError("a number of more than 64 bits")
    return value


def unpack_text(field: bytes) -> str:
    """Return the text in a field.

    Raises:
        WireError: the field is not UTF-8.
    """
    try:
        return field.decode()
    except UnicodeDecodeError:
        raise WireError("not UTF-8") from None


def frames(messages: Sequence[M]) -> list[list[M]]:
    """Group the messages, in order, into as few frames as the limits allow."""
    made: list[list[M]] = []
    size = 0
    for message in messages:
        if not made or size + len(message) > MAX_FRAME_BYTES or len(made[-1]) == MAX_MESSAGES:
            made.append([])
            size = 0
        made[-1].append(message)
        size += len(message)
    return made
