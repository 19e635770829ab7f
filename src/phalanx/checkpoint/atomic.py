"""A file that appears whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Make `path` a file with what `write` puts into it, durably: it survives a power cut once this returns.

    The bytes go to a hidden file in the same folder, which takes the name at the end. If anything fails, the hidden
    file is removed and what was at `path` stays. A symbolic link stays a link; what it points to is replaced. Only a
    SIGKILL or a power cut in the middle leaves the hidden file (`.<name>.<random>.partial`), which may be deleted.

    Raises:
        OSError: the folder or the disk would not have it.
        Exception: whatever `write` raises.
    """
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Make the new name durable too: on most file systems it is not before its folder is."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
