"""Check that a file is what was written, by CRC-32 of torch.save's records and of whole files.

The checksum of a whole file is computed while it is written.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

_BLOCK_BYTES = 1 << 20


class ChecksummedStream:
    """`ChecksummedStream` writes to `file`, and knows the length and the checksum of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc32 = 0
        self.nbytes = 0

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.crc32 = zlib.crc32(view, self.crc32)
        self.nbytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Return how much was written."""
        return self.nbytes

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def fileno(self) -> int:
        """Return the file's descriptor, for fsync."""
        return self._file.fileno()

    def close(self) -> None:
        """Flush the file; whoever opened it closes it."""
        self.flush()


def checksum_of(path: Path, see: Callable[[bytes], None] = lambda block: None) -> tuple[int, int]:
    """Return length and CRC-32 of a file, which is read once; `see` gets every block of it."""
    nbytes = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES * 16):
            nbytes += len(block)
            crc = zlib.crc32(block, crc)
            see(block)
    return nbytes, crc


def find_damage(file: BinaryIO) -> str:
    """Return in words the first record of the archive that is not what its checksum says; empty if all are.

    A file that was written without checksums (torch.utils.serialization.config.save.compute_crc32 is False: all are
    zero) passes.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if all(record.CRC == 0 for record in records):
                return ""
            for record in records:
                if problem := _problem(archive, record):
                    return f"record {record.filename!r} ({record.file_size:,} bytes) {problem}"
    except (zipfile.BadZipFile, NotImplementedError, ValueError, UnicodeDecodeError) as error:
        return f"its table of contents: {error}"
    return ""


# MS-DOS's attribute of a folder, which the reader of torch.load believes: it would leave the tensor's memory unset
_FOLDER = 0x10


def _problem(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> str:
    if record.external_attr & _FOLDER or record.is_dir():
        return "is marked as a folder"
    try:
        with archive.open(record) as content:
            while content.read(_BLOCK_BYTES):
                pass
    except zipfile.BadZipFile as error:
        return "does not match its checksum" if "CRC" in str(error) else f"cannot be read: {error}"
    except Exception as error:  # a flipped bit may name another compression, a password, an offset behind the end
        return f"cannot be read: {type(error).__name__}: {error}"
    return ""
