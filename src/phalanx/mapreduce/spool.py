"""A `Spool` stores bytes that are written once and read by offset: in memory up to a limit, then on disk.

The file has no name, so it disappears however this process ends.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

_COPY_BYTES = 1 << 20


class SpoolExtent(NamedTuple):
    """A `SpoolExtent` is the offset and length of bytes in a spool."""

    offset: int
    length: int


class Spool:
    """A `Spool` moves from memory to a file in `folder` (None: TMPDIR) when it exceeds `memory_bytes`."""

    def __init__(self, memory_bytes: int, folder: str | None) -> None:
        self._memory_bytes = memory_bytes
        self._folder = folder
        self._parts: list[tuple[int, bytes]] = []  # bytes with their offsets; empty once the spool is on disk
        self._starts: list[int] = []
        self._fd = -1
        self.size = 0
        self.spilled_bytes = 0

    def append(self, data: bytes | memoryview) -> SpoolExtent:
        """Append `data`; return its extent."""
        extent = SpoolExtent(self.size, len(data))
        if self._fd < 0 and self.size + len(data) > self._memory_bytes:
            self._move_to_disk()
        if self._fd >= 0:
            self._write(self._fd, data, self.size)
        elif data:
            self._starts.append(self.size)
            self._parts.append((self.size, bytes(data)))
        self.size += len(data)
        return extent

    def read(self, offset: int, length: int) -> bytes:
        if not length:
            return b""
        if self._fd >= 0:
            return self._read(offset, length)
        index = bisect_right(self._starts, offset) - 1
        start, data = self._parts[index]
        if start == offset and len(data) == length:
            return data
        found = bytearray()
        while len(found) < length:
            start, data = self._parts[index]
            begin = offset + len(found) - start
            found += data[begin : begin + length - len(found)]
            index += 1
        return bytes(found)

    def truncate(self, size: int) -> None:
        """Remove the bytes from offset `size` on, where some `append` must have begun."""
        if self._fd >= 0:
            os.ftruncate(self._fd, size)
        while self._starts and self._starts[-1] >= size:
            self._starts.pop()
            self._parts.pop()
        self.size = size

    def close(self) -> None:
        if self._fd >= 0:
            self._close_file()
        self._parts, self._starts = [], []

    def _move_to_disk(self) -> None:
        file = tempfile.TemporaryFile(prefix="phalanx-mapreduce-", dir=self._folder)  # noqa: SIM115 - its descriptor lives on
        with file:
            for offset, data in self._parts:  # if the disk is full, the parts stay in memory
                self._write(file.fileno(), data, offset)
            self._fd = os.dup(file.fileno())
        os.set_inheritable(self._fd, False)
        self._close_file = weakref.finalize(self, os.close, self._fd)
        self._parts, self._starts = [], []

    def _write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        self.spilled_bytes += len(view)
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written

    def _read(self, offset: int, length: int) -> bytes:
        found = os.pread(self._fd, length, offset)
        while len(found) < length:  # Linux reads at most 2 GiB at once
            part = os.pread(self._fd, length - len(found), offset + len(found))
            if not part:
                raise OSError(f"map_reduce: {length} bytes spilled at {offset} are gone from the temporary file")
            found += part
        return found


class SpoolStream:
    """A `SpoolStream` reads extents of a spool as one stream."""

    def __init__(self, spool: Spool, extents: Sequence[SpoolExtent]) -> None:
        self._spool = spool
        self._extents = list(extents)
        self._ends = list(accumulate(extent.length for extent in self._extents))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start`, or fewer at the end of the stream."""
        parts = list(self._parts(start, min(start + length, len(self))))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def length_of(self, start: int, length: int) -> int:
        """Return how many bytes `read` would return."""
        return max(0, min(length, len(self) - start))

    def part(self, start: int, length: int) -> SpoolStream:
        """Return the `length` bytes from `start` as a separate stream."""
        extents = []
        index, stop = bisect_right(self._ends, start), start + length
        while start < stop:
            offset, size = self._extents[index]
            skip = start - (self._ends[index] - size)
            take = min(size - skip, stop - start)
            if take:
                extents.append(SpoolExtent(offset + skip, take))
            start += take
            index += 1
        return SpoolStream(self._spool, extents)

    def _parts(self, start: int, stop: int) -> Iterator[bytes]:
        for offset, length in self.part(start, stop - start)._extents:
            yield self._spool.read(offset, length)
