"""A frame is a message whose length both ends know before, so that its receive can be posted before it is sent.

A frame is a header and what it announces, in one message. On each edge all frames have one length, whatever is in
them, as some transports compare lengths; what does not fit follows beside, in messages of its own. The length is that
of the header until a step has shown what goes there; both ends learn it from the messages that both have seen, at the
end of a step that went well on all ranks.

    header | form, if it is news | tensors, each from a multiple of 64 bytes on | unused
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from phalanx.pipeline.edges import Edge

WORDS = 64
HEADER_BYTES = 8 * WORDS
MOST_BYTES = 2**20
"""The most bytes of a frame: each is copied once on its way out, and a posted one takes memory before it is needed."""
_ALIGNED = 64


class Frames:
    """`Frames` knows how long the frames of each edge are, in training and in evaluation."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[Edge, bool], int] = {}
        self._needed: dict[tuple[Edge, bool], int] = {}
        self._grad = False

    def begin(self, *, grad: bool) -> None:
        """Begin a step, with a backward or without one."""
        self._grad = grad
        self._needed.clear()

    def length_of(self, edge: Edge) -> int:
        return self._lengths.get((edge, self._grad), HEADER_BYTES)

    def note(self, edge: Edge, needed: int) -> None:
        """Note that a message needed so many bytes, whether or not its frame had them. Both ends note the same."""
        key = edge, self._grad
        self._needed[key] = max(self._needed.get(key, 0), needed)

    def learn(self) -> None:
        """End the step on all ranks: from now on frames are as long as its messages have needed, or were before.

        Messages that would make a frame too long go beside it; the frame stays a header then.
        """
        for key, needed in self._needed.items():
            if needed <= MOST_BYTES:
                self._lengths[key] = max(needed, self._lengths.get(key, HEADER_BYTES))
        self._needed.clear()


def end_of(begin: int, nbytes: Iterable[int]) -> int:
    """Return where a frame ends that has these parts from `begin` on."""
    return begin + sum(map(aligned, nbytes))


def aligned(nbytes: int) -> int:
    """Return how much room a part takes."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


def tensor_in(frame: Tensor, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor over the bytes of `frame` from `begin`. It is no view: each counts its in-place changes."""
    flat = torch.empty(0, dtype=dtype)
    return flat.set_(frame.untyped_storage(), begin // dtype.itemsize, (math.prod(shape),), (1,)).view(shape)


def nbytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of the elements."""
    return math.prod(shape) * dtype.itemsize
