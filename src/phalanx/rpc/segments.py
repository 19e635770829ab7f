"""A segment is a memfd through which one process sends large tensors to another on the same host.

    sender                                      receiver
    lend a segment, copy the tensor into it
    its descriptor, the first time   ------->   map it
    a frame with the segment's number  ------>  the tensor is in it: no copy
                                                the tensor is freed
    free again, for the next tensor  <-------   RELEASE

A segment belongs to the process that created it, and is lent to one receiver at a time. The process keeps up to
`MOST_FREE_BYTES` of free segments; beyond that it drops segments, and their receivers unmap them (FORGET). A segment
that is lent to a lost receiver is not used again.

Before a receiver forks, it copies its received tensors to private memory: otherwise the child would see the next tensor
in the segment, and parent and child each other's writes. The copy returns the segments to the sender (MISSED).
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
_STEPS = 3  # a segment is at most 1/8 larger than its tensor


def capacity(nbytes: int) -> int:
    """Return the size of a segment for `nbytes`: rounded up to one of a few sizes, so that segments can be reused."""
    step = max(_PAGES, 1 << max(0, nbytes.bit_length() - 1 - _STEPS))
    return -(-nbytes // step) * step


class Segment:
    """A `Segment` is shared memory of this process."""

    def __init__(self, number: int, nbytes: int) -> None:
        with memory("phalanx-rpc", nbytes) as fd:
            self.fd = os.dup(fd)
        self.number = number
        self.nbytes = nbytes
        self.bytes = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)
        self.known_to: set[int] = set()  # the connections that have sent its descriptor

    def close(self) -> None:
        """Close the descriptor; processes that still map the segment may keep using it."""
        os.close(self.fd)
        self.fd = -1


class SegmentPool:
    """A `SegmentPool` owns the segments of this process, and tracks the receiver of each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._free: dict[int, list[Segment]] = {}
        self._free_bytes = 0
        self._lent: dict[int, tuple[Segment, int]] = {}
        self._forget: dict[int, Callable[[list[int]], None]] = {}

    def join(self, connection: int, forget: Callable[[list[int]], None]) -> None:
        """Add the process behind `connection`; until that process is lost, `forget` sends it the segments to unmap."""
        with self._lock:
            self._forget[connection] = forget

    def lend(self, nbytes: int, connection: int) -> Segment:
        """Lend the process behind `connection` a segment of at least `nbytes`.

        Raises:
            PhalanxError: no shared memory could be created.
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

    def reclaim(self, number: int, *, arrived: bool = True) -> None:
        """Reclaim a segment that is free again; if too many bytes are free, close some segments and notify receivers.

        Without `arrived`, the receiver has no descriptor of the segment: the next use sends the descriptor again.
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
        self._notify_receivers(dropped)

    def _notify_receivers(self, dropped: Iterable[Segment]) -> None:
        """Notify all receivers of these segments to unmap them; otherwise the memory would stay in use."""
        numbers: dict[int, list[int]] = {}
        for segment in dropped:
            for connection in segment.known_to:
                numbers.setdefault(connection, []).append(segment.number)
        for connection, gone in numbers.items():
            forget = self._forget.get(connection)
            if forget is not None:
                forget(gone)

    def lost(self, connection: int) -> None:
        """Never reuse the segments lent to the process behind `connection`: it may still read them."""
        with self._lock:
            self._forget.pop(connection, None)
            numbers = [number for number, (_, who) in self._lent.items() if who == connection]
            dropped = [self._lent.pop(number)[0] for number in numbers]
            for one in dropped:
                one.close()
            for free in self._free.values():
                for segment in free:
                    segment.known_to.discard(connection)
        self._notify_receivers(dropped)

    def close(self) -> None:
        with self._lock:
            for free in self._free.values():
                for segment in free:
                    segment.close()
            for segment, _ in self._lent.values():
                segment.close()
            self._free, self._lent, self._free_bytes, self._forget = {}, {}, 0, {}


class SegmentMaps:
    """A `SegmentMaps` maps the segments of the process at the other end of a connection.

    `released(number)` is called when the tensor in a segment is freed, in any thread: it must neither wait nor lock.
    """

    def __init__(self, released: Callable[[int], None]) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._alive: dict[int, Any] = {}
        self._released = released

    def has(self, number: int) -> bool:
        return number in self._maps

    def add(self, number: int, fd: int) -> None:
        """Map the segment, and close the descriptor."""
        try:
            self._maps[number] = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def view(self, number: int, nbytes: int) -> Any:
        """Return the first bytes of a segment as an array; the bytes stay valid as long as the array lives."""
        array = numpy.frombuffer(self._maps[number], dtype=numpy.uint8, count=nbytes)
        released, alive = self._released, self._alive

        def died(_: object) -> None:
            alive.pop(number, None)
            released(number)

        alive[number] = ref(array, died)
        return array

    def make_private(self) -> list[int]:
        """Replace the segments of all living tensors with private memory, and return the segments' numbers.

        Cost: a copy of the living tensors.

        Raises:
            OSError: there is no memory for the copies.
        """
        freed: list[int] = []
        for number, reference in list(self._alive.items()):
            array = reference()
            if array is not None:
                _make_private(array.ctypes.data, len(self._maps[number]))
                self._alive.pop(number, None)  # when the tensor is freed, the segment must not be released again
                self._maps.pop(number, None)
                freed.append(number)
        return freed

    def forget(self, number: int) -> None:
        """Unmap a segment that will not be lent again."""
        self._maps.pop(number, None)

    def forget_all(self) -> None:
        """Unmap all segments except those of living tensors."""
        self._maps.clear()


_FIXED_AND_MAY_MOVE = 3  # of mremap(2)


def _make_private(address: int, nbytes: int) -> None:
    """Replace these pages with a private copy; for threads that read them, the replacement is atomic."""
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
