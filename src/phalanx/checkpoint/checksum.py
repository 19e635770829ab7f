"""Whether a file of torch.save is what was written: each of its records carries a CRC-32, which torch.load ignores."""

from __future__ import annotations

import zipfile
from typing import BinaryIO

_BLOCK_BYTES = 1 << 20


def find_damage(file: BinaryIO) -> str:
    """The first record of the archive that is not what its checksum says, in words; empty if all are.

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


_FOLDER = 0x10  # MS-DOS's attribute, which the reader of torch.load believes: it would leave the tensor's memory unset


def _problem(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> str:
    if record.external_attr & _FOLDER or record.is_dir():
        return "is marked as a folder"
    try:
        with archive.open(record) as content:
            while content.read(_BLOCK_BYTES):
                pass
    except zipfile.BadZipFile as error:
        return "does not match its checksum" if "CRC" in str(error) else f"cannot be read: {error}"
    except Exception as error:  # a flipped bit names another compression, a password, an offset behind the end
        return f"cannot be read: {type(error).__name__}: {error}"
    return ""
