"""Verify files by CRC-32: whole files, and the records in files of torch.save."""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

_BLOCK_BYTES = 1 << 20
_READ_BYTES = 4 << 20
_PIECE_BYTES = 64 << 20


class Crc32:
    """`Crc32` is the CRC-32 of consecutive bytes, given as bytes or as the checksum of a range."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: bytes | memoryview) -> None:
        self.value = zlib.crc32(data, self.value)

    def extend(self, crc32: int, nbytes: int) -> None:
        """Append `nbytes` bytes whose checksum is `crc32`."""
        self.value = _times(_shift(nbytes), self.value) ^ crc32


# A CRC-32 is the remainder of the bits, as a polynomial, modulo this polynomial; the highest bit has the lowest power.
# (Mark Adler, zlib's crc32_combine: the first part's remainder is multiplied by x to the power of the second part's
# number of bits.)
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials, modulo the polynomial of CRC-32."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(maxsize=256)
def _shift(nbytes: int) -> int:
    """Return x to the power of 8 * `nbytes`, modulo the polynomial of CRC-32."""
    power, square = _ONE, _ONE >> 8
    while nbytes:
        if nbytes & 1:
            power = _times(square, power)
        square = _times(square, square)
        nbytes >>= 1
    return power


def crc32_of_range(file: BinaryIO, begin: int, nbytes: int) -> int:
    """Return the CRC-32 of `nbytes` of a file from `begin`, or of fewer if the file ends earlier."""
    crc, end = 0, begin + nbytes
    with contextlib.suppress(ImportError):
        from phalanx import _core

        if _core.crc32_is_fast():
            while begin < end:  # in pieces, so that Ctrl-C is handled between them
                crc, done = _core.crc32_of_range(file.fileno(), begin, min(end - begin, _PIECE_BYTES), crc)
                if not done:
                    break
                begin += done
            return crc
    block = memoryview(bytearray(min(_READ_BYTES, max(nbytes, 1))))
    while begin < end and (done := os.preadv(file.fileno(), [block[: end - begin]], begin)):
        crc = zlib.crc32(block[:done], crc)
        begin += done
    return crc


def checksum_of(path: Path) -> int:
    """Return the CRC-32 of a file. Reads the file once."""
    with path.open("rb") as file:
        return crc32_of_range(file, 0, os.fstat(file.fileno()).st_size)


def find_damage(file: BinaryIO) -> str:
    """Return a description of the archive's first record that does not match its checksum; "" if all match.

    A file without checksums (torch.utils.serialization.config.save.compute_crc32 is False: all are zero) passes.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if all(record.CRC == 0 for record in records):
                return ""
            for record in records:
                if problem := _problem(archive, file, record):
                    return f"record {record.filename!r} ({record.file_size:,} bytes) {problem}"
    except (zipfile.BadZipFile, NotImplementedError, ValueError, UnicodeDecodeError) as error:
        return f"its table of contents: {error}"
    return ""


# the MS-DOS attribute of a folder: torch.load's reader trusts it, and would leave a tensor's memory uninitialised
_FOLDER = 0x10


# A record's local header: 26 bytes, the lengths of the name and the extra field, then the name and the extra field.
_LOCAL_HEADER = struct.Struct("<26xHH")


def _problem(archive: zipfile.ZipFile, file: BinaryIO, record: zipfile.ZipInfo) -> str:
    if record.external_attr & _FOLDER or record.is_dir():
        return "is marked as a folder"
    try:
        with archive.open(record) as content:  # this compares the two headers of the record
            if record.compress_type == zipfile.ZIP_STORED and record.compress_size == record.file_size:
                header = os.pread(file.fileno(), _LOCAL_HEADER.size, record.header_offset)
                begin = record.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
                if crc32_of_range(file, begin, record.file_size) != record.CRC:
                    return "does not match its checksum"
            else:
                while content.read(_BLOCK_BYTES):
                    pass
    except zipfile.BadZipFile as error:
        return "does not match its checksum" if "CRC" in str(error) else f"cannot be read: {error}"
    except Exception as error:  # a flipped bit may name another compression, a password, or an offset past the end
        return f"cannot be read: {type(error).__name__}: {error}"
    return ""
