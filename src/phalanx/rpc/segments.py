"""A segment is a memfd in which large tensors go from one process of a host to another.

    sender                                      receiver
    lend a segment, copy the tensor into it
    its descriptor, the first time   ------->   map it
    a frame with the segment's number  ------>  the tensor lies in it: no copy
                                                the tensor dies
    free again, for the next tensor  <-------   RELEASE

A segment belongs to the process that made it, and is with one receiver at a time. So many bytes are kept for later as
`MOST_FREE_BYTES` says; the others go back to the system, as soon as all receivers that map them have heard of it
(FORGET). One that a receiver had when it was lost is not used again.

Where a receiver forks, what it has received becomes its own before: else the child would see the next tensor in the
segment, and parent and child what the other one writes. The sender has the segment back by that (MISSED).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import numpy
import torch

from phalanx._comm.symmetric_memory.memfd import memory

FROM_BYTES = 1 << 16  # below this the socket is as fast
MOST_FREE_BYTES = 1 << 29
_PAGES = 1 << 16
_STEPS = 3  # a segment is at most 1/8 larger than what lies in it


def capacity(nbytes: int) -> int:
    """Return the size of the segment for so many bytes: of few different sizes, so that segments are used again."""
    step = max(_PAGES, 1 << max(0, nbytes.bit_length() - 1 - _STEPS))
    return -(-nbytes // step) * step


class Segment:
    """`Segment` is memory that this process has made."""

    def __init__(self, number: int, nbytes: int) -> None:
        with memory("phalanx-rpc", nbytes) as fd:
            self.fd = os.dup(fd)
        self.number = number
        self.nbytes = nbytes
        self.bytes = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)
        self.known_to: set[int] = set()  # the connections through which its descriptor has gone

    def close(self) -> None:
        """Close it; a process that still maps it may go on."""
        os.close(self.fd)
        self.fd = -1


class Lender:
    """`Lender` has the segments of this process, and knows which worker has each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._free: dict[int, list[Segment]] = {}
        self._free_bytes = 0
        self._lent: dict[int, tuple[Segment, int]] = {}
        self._forget: dict[int, Callable[[list[int]], None]] = {}

    def join(self, connection: int, forget: Callable[[list[int]], None]) -> None:
        """Add the process behind `connection`; until it is lost, `forget` tells it which segments are withdrawn."""
        with self._lock:
            self._forget[connection] = forget

    def lend(self, nbytes: int, connection: int) -> Segment:
        """Return a segment that has room for `nbytes`, for the process behind `connection`.

        Raises:
            PhalanxError: no memory can be shared.
        """
        size = capacity(nbytes)
        with self._lock:
            free = self._free.get(size)
            if free:
                segment = free.pop()
                self._free_bytes -= size
            else:
                self._last += 1
                segment = Segment(self._last, size)
            self._lent[segment.number] = segment, connection
            return segment

    def take_back(self, number: int, *, arrived: bool = True) -> None:
        """Take back a segment that is free again; if there are too many, close some, and tell those that map them.

        `arrived` says whether its descriptor has arrived; else it is sent again the next time.
        """
        dropped: list[Segment] = []
        with self._lock:
            segment, connection = self._lent.pop(number, (None, 0))
            if segment is None:
                return
            if not arrived:
                segment.known_to.discard(connection)
            self._free.setdefault(segment.nbytes, []).append(segment)
            self._free_bytes += segment.nbytes
            while self._free_bytes > MOST_FREE_BYTES:
                size = next(size for size, free in self._free.items() if free)
                dropped.append(self._free[size].pop(0))
                self._free_bytes -= size
                if not self._free[size]:
                    del self._free[size]
            for one in dropped:
                one.close()
        self._tell(dropped)

    def _tell(self, dropped: Iterable[Segment]) -> None:
        """Tell every receiver that has mapped these segments to unmap them: else their memory would stay in use."""
        numbers: dict[int, list[int]] = {}
        for segment in dropped:
            for connection in segment.known_to:
                numbers.setdefault(connection, []).append(segment.number)
        for connection, gone in numbers.items():
            forget = self._forget.get(connection)
            if forget is not None:
                forget(gone)

    def lost(self, connection: int) -> None:
        """Never reuse the segments that the process behind `connection` has: it is gone or may still read them."""
        with self._lock:
            self._forget.pop(connection, None)
            numbers = [number for number, (_, who) in self._lent.items() if who == connection]
            dropped = [self._lent.pop(number)[0] for number in numbers]
            for one in dropped:
                one.close()
            for free in self._free.values():
                for segment in free:
                    segment.known_to.discard(connection)
        self._tell(dropped)

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return self._free_bytes + sum(segment.nbytes for segment, _ in self._lent.values())

    def close(self) -> None:
        with self._lock:
            for free in self._free.values():
                for segment in free:
                    segment.close()
            for segment, _ in self._lent.values():
                segment.close()
            self._free, self._lent, self._free_bytes, self._forget = {}, {}, 0, {}


class Borrower:
    """`Borrower` has the segments of the process at the other end of a connection, mapped.

    `released` gets a segment's number when what lay in it has died: anywhere, so it must neither wait nor lock.
    """

    def __init__(self, released: Callable[[int], None]) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._alive: dict[int, Any] = {}
        self._released = released

    def knows(self, number: int) -> bool:
        return number in self._maps

    def add(self, number: int, fd: int) -> None:
        """Map a segment, and close the descriptor."""
        try:
            self._maps[number] = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def view(self, number: int, nbytes: int) -> Any:
        """Return the first bytes of a segment, which stay valid until nobody holds them any more."""
        array = numpy.frombuffer(self._maps[number], dtype=numpy.uint8, count=nbytes)
        released, alive = self._released, self._alive

        def died(_: object) -> None:
            alive.pop(number, None)
            released(number)

        alive[number] = ref(array, died)
        return array

    def make_private(self) -> list[int]:
        """Put memory of this process's own under all that lies in segments, and return their numbers.

        Cost: a copy of what is alive, once.

        Raises:
            OSError: there is no memory for it.
        """
        freed: list[int] = []
        for number, reference in list(self._alive.items()):
            array = reference()
            if array is not None:
                _make_private(array.ctypes.data, len(self._maps[number]))
                self._alive.pop(number, None)  # nothing is released when it dies
                self._maps.pop(number, None)
                freed.append(number)
        return freed

    def forget(self, number: int) -> None:
        """Unmap a segment that will not come again."""
        self._maps.pop(number, None)

    def forget_all(self) -> None:
        """Unmap all segments, of which some tensors may still hold their own."""
        self._maps.clear()


_FIXED_AND_MAY_MOVE = 3  # of mremap(2)


def _make_private(address: int, nbytes: int) -> None:
    """Put a private copy of some pages in their place, in one step for all who read them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    pages, wrong = ctypes.c_size_t(nbytes), ctypes.c_void_p(-1).value
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    made = libc.mmap(None, pages, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0))
    if made == wrong:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    ctypes.memmove(made, address, nbytes)
    moved = libc.mremap(ctypes.c_void_p(made), pages, pages, _FIXED_AND_MAY_MOVE, ctypes.c_void_p(address))
    if moved == wrong:
        problem = ctypes.get_errno()
        libc.munmap(ctypes.c_void_p(made), pages)
        raise OSError(problem, os.strerror(problem))
