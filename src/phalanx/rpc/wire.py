"""A frame is a message from one worker to another: a call, an answer, or a notice about segments or lines.

    bytes in all (u64) · call (u64) · pickled bytes (u64) · bytes of extras (u32) · buffers (u32) · kind (u8) · 0 (7 u8)
    for each buffer: bytes (u64), segment (u64)
    the pickled object · the extras, pickled · each buffer whose segment is 0

A buffer is the memory of a tensor. On one host, a large buffer is in memory that both processes map (`segments`), and
the frame has the segment's number; all other buffers end the frame. `extras` are the references in the call, and the
note of the call hook (the context of distributed autograd). All numbers are little-endian.
"""

from __future__ import annotations

import enum
import pickle
import struct
from collections.abc import Sequence
from typing import Any

HEAD = struct.Struct("<QQQIIB7x")
BUFFER = struct.Struct("<QQ")


class Kind(enum.IntEnum):
    """A `Kind` is the purpose of a frame."""

    REQUEST = 1  # call a function of the user
    REMOTE = 2  # the same, but keep the result; the answer confirms the call
    CONTROL = 3  # a message between agents; with a call number of 0 it has no answer
    REPLY = 4
    ERROR = 5
    RELEASE = 6  # these segments are free again
    FORGET = 7  # unmap these segments
    FETCH = 8  # request the object of a reference
    ORDER = 9  # like CONTROL, but not pickled: the first byte is an `Order`
    MISSED = 10  # these segments are free again, and the receiver needs their descriptors again
    LINE = 11  # open the line with this number; the answer, of the same kind, has data if the line is open


class Order(enum.IntEnum):
    """An `Order` is a kind of message between agents that is too frequent to be pickled."""

    GRADIENTS = 1  # a `PassMessage` of a backward pass
    STEP = 2  # a step of an optimizer


REQUEST, REMOTE, CONTROL, REPLY, ERROR, RELEASE, FORGET, FETCH, ORDER, MISSED, LINE = map(int, Kind)


class Frame:
    """A `Frame` is a received frame."""

    __slots__ = ("buffers", "call", "data", "extras", "kind")

    def __init__(self, kind: int, call: int, data: Any, extras: Any = b"", buffers: Sequence[Any] = ()) -> None:
        self.kind = kind
        self.call = call
        self.data = data
        self.extras = extras
        self.buffers = buffers


def head(kind: int, call: int, data: Any, extras: Any, buffers: Sequence[tuple[int, int]]) -> bytes:
    """Return the head of a frame, with its table of buffers; `buffers` are (bytes, segment) pairs."""
    nbytes = HEAD.size + len(data) + len(extras)
    if not buffers:
        return HEAD.pack(nbytes, call, len(data), len(extras), 0, kind)
    nbytes += BUFFER.size * len(buffers)
    nbytes += sum(size for size, segment in buffers if not segment)
    first = HEAD.pack(nbytes, call, len(data), len(extras), len(buffers), kind)
    return first + b"".join(BUFFER.pack(*one) for one in buffers)


def view_bytes(buffer: Any) -> memoryview:
    """Return the memory of a contiguous buffer of any shape as bytes."""
    return pickle.PickleBuffer(buffer).raw()
