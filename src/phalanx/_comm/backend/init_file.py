"""Check the file of `init_method="file://..."`, and refuse a file that no store has written.

torch's FileStore appends records to its file, and each rank reads all of them. The constructor takes the first bytes of
any file for the length of a key, and waits for the rest of that key without a timeout.

    u32 length | key | u32 length | value | u32 length | key | ...
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

from phalanx._base.deadline import Deadline
from phalanx.errors import DeadlineError

_LENGTH = struct.Struct("=I")
_POLL_S = 0.005


def file_rendezvous(
    original: Callable[..., Iterator[Any]], url: str, timeout: timedelta, **kwargs: Any
) -> Iterator[Any]:
    """Yield from torch's handler of `file://`, after checking that the file is a FileStore's or is missing."""
    check_init_file(url, Deadline.after(timeout))
    yield from original(url, timeout=timeout, **kwargs)


def check_init_file(url: str, deadline: Deadline) -> None:
    """Refuse a `file://` URL of a file that no FileStore has written; a missing file is allowed.

    Wait for the file's directory, which another rank may be creating.

    Raises:
        ValueError: no FileStore has written this file; the message has advice.
        DeadlineError: its directory did not appear, or another process held the file's lock until the deadline.
    """
    path = urlparse(url).path  # as torch reads it: without decoding %20
    here = f"init_method='file://{path}'"
    folder = os.path.dirname(path) or "/"
    _wait(
        lambda: os.path.exists(folder),
        f"{here}: there is no folder {folder}.\nCreate it before the ranks start, on storage that all ranks share.",
        deadline,
    )
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # it does not exist yet, or torch reports why it cannot be opened
        return
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError(f"{here}: not a regular file. Choose a path where no file exists.")
        _wait(
            lambda: _lock(file),
            f"{here}: another process has locked this file, so no rank can write to it.\nFind that "
            "process with `fuser`, or choose another path, the same on every rank.",
            deadline,
        )
        if not is_written_by_store(file):
            raise ValueError(
                f"{here}: the file holds {os.fstat(file).st_size} bytes that no FileStore wrote.\nChoose a path "
                "where no file exists, the same on every rank, or remove this file if nobody needs it."
            )
    finally:
        os.close(file)  # releases the lock


def is_written_by_store(file: int) -> bool:
    """Return whether an open file is empty or has complete records of a FileStore; only field lengths are checked."""
    size = os.fstat(file).st_size
    position, fields = 0, 0
    while position < size:
        length = os.pread(file, _LENGTH.size, position)
        if len(length) < _LENGTH.size:
            return False
        if fields % 2 == 0 and not any(length):  # a key is never empty
            return False
        position += _LENGTH.size + _LENGTH.unpack(length)[0]
        fields += 1
    return position == size and fields % 2 == 0


def _lock(file: int) -> bool:
    """Lock the file against writes by other ranks; return False if a rank is writing now."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks; torch reports it
        pass
    return True


def _wait(is_ready: Callable[[], bool], failure: str, deadline: Deadline) -> None:
    if not deadline.wait_until(is_ready, _POLL_S):
        raise DeadlineError(failure)
