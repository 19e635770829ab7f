"""Let torch.save start its writes to the disk early, and let torch.load read a part of a file."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any, BinaryIO

from phalanx.checkpoint.checksum import Crc32, crc32_of_range

_WRITEBACK_BYTES = 16 << 20  # written to the disk at a time
# The checksum of a larger write is computed only if torch.save does not append its own.
_RECORD_BYTES = 1 << 18
_FOOTER, _FOOTER_BYTES = (
    b"PK\x07\x08",
    (16, 24),
)  # a zip's data descriptor: magic, CRC-32, and the sizes in 4 or 8 bytes


class DiskStream:
    """`DiskStream` writes to a new `file`, and starts writeback early, so that fsync waits for less."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._submitted = 0
        self.nbytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.nbytes += len(view)
        if (pending := self.nbytes - self._submitted) >= _WRITEBACK_BYTES:
            with contextlib.suppress(ImportError):  # without the core, writeback begins at the end
                from phalanx import _core

                _core.start_writeback(self._file.fileno(), self._submitted, pending)
            self._submitted += pending
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.nbytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        """Return the file's descriptor, for fsync."""
        return self._file.fileno()

    def close(self) -> None:
        """Flush the file, which its owner closes."""
        self.flush()


class ChecksummedStream(DiskStream):
    """`ChecksummedStream` writes to `file`, which must also be readable, and computes the checksum of all bytes.

    torch.save computes the CRC-32 of each record and writes it after the record. This reuses that checksum, since
    computing it again would take as long as writing the record.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._crc = Crc32()
        self._record_bytes = 0  # the length of the last write, if its checksum is not known yet

    @property
    def crc32(self) -> int:
        """Return the CRC-32 of all bytes written."""
        self._read_record_again()
        return self._crc.value

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._record_bytes and (appended := _appended_checksum(view, self._record_bytes)) is not None:
            self._crc.extend(appended, self._record_bytes)
            self._record_bytes = 0
        self._read_record_again()
        super().write(view)
        if len(view) >= _RECORD_BYTES:
            self._record_bytes = len(view)
        else:
            self._crc.update(view)
        return len(view)

    def _read_record_again(self) -> None:
        """Read the last write again to compute its checksum, if torch.save has not appended one."""
        if self._record_bytes:
            self.flush()
            begin = self.nbytes - self._record_bytes
            self._crc.extend(crc32_of_range(self._file, begin, self._record_bytes), self._record_bytes)
            self._record_bytes = 0


def _appended_checksum(footer: memoryview, record_bytes: int) -> int | None:
    """Return the CRC-32 of the preceding record from a zip's data descriptor; None if `footer` is not one."""
    if len(footer) not in _FOOTER_BYTES or footer[:4] != _FOOTER:
        return None
    size = (len(footer) - 8) // 2
    packed, plain = footer[8 : 8 + size], footer[8 + size :]
    if int.from_bytes(packed, "little") != record_bytes or int.from_bytes(plain, "little") != record_bytes:
        return None
    return int.from_bytes(footer[4:8], "little") or None  # zero: torch.save was configured to compute none


class FileRange(io.RawIOBase):
    """`FileRange` is a part of a file, `nbytes` from `begin`, that can be read like a file.

    torch.load reads a tensor from it directly into the tensor's memory.
    """

    def __init__(self, file: BinaryIO, begin: int, nbytes: int) -> None:
        self._file = file
        self._begin = begin
        self._nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Seek to a position in this part of the file, and return it."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        self._at = max(origin + offset, 0)
        return self._at

    def tell(self) -> int:
        """Return the position in this part of the file."""
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` from the file, and return the number of bytes read."""
        view = memoryview(buffer).cast("B")[: max(self._nbytes - self._at, 0)]
        done = os.preadv(self._file.fileno(), [view], self._begin + self._at)
        self._at += done
        return done
