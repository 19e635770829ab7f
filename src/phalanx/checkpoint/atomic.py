"""Write a file that appears whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial")
# The kernel says these if a file system has no files without a name, or no way to name one later.
_NAMELESS_REFUSED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.EPERM, errno.EXDEV)
# It says these if a folder cannot be synchronised, or not by this user: then there is nothing more to do.
_NO_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM, errno.EBADF, errno.EROFS)
# the most characters that are taken from a name, which may itself be as long as a file system allows
_NAME_CHARACTERS = 50
_BLOCK_BYTES = 1 << 20


class NotDurableError(OSError):
    """The file is complete and has its name; the disk failed when the folder was to be synchronised."""


def replace_file(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Make `path` a file with what `write` puts into it, durably: it survives a power cut once this returns.

    The bytes go to a file without a name in the same folder, which takes the name at the end. If anything fails, or
    this process dies, that file is gone and what was at `path` stays. A symbolic link stays a link; what it points to
    is replaced. Where the file system has no files without a name, it is a hidden one (`.<name>.<random>.partial`),
    which a process killed in the middle leaves; the next call removes those of its folder that no living
    process is writing.

    A pipe or a character device (`/dev/null`, `/dev/stdout`) is no name to be taken: it is written to, when all is
    complete. `write` may be called a second time, with an empty file.

    Raises:
        NotDurableError: it is there, and may not survive a power cut.
        OSError: the folder or the disk would not have it, or `path` is a disk or a socket.
        Exception: whatever `write` raises.
    """
    if _is_stream(path):
        _stream(path, write)
        return
    path = Path(os.path.realpath(path))
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    remove_abandoned(path.parent)
    if not _write_unnamed(path, write):
        with _named(path) as file:
            _fill(file, write)
            os.replace(file.name, path)
    sync_directory(path.parent)


def remove_abandoned(folder: Path) -> None:
    """Remove the hidden files of writers that have died: a living one holds a lock on its own."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _PARTIAL.fullmatch(entry.name):
                with suppress(OSError):  # another's, or in use, or just gone
                    _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    finally:
        os.close(fd)


def _is_stream(path: Path) -> bool:
    """Return whether `path` leads to something that must be written to, and not replaced.

    Raises:
        OSError: `path` allows neither.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise
        return False  # nothing is there, or the reason why we cannot look shows when the file is made
    if stat.S_ISBLK(mode):  # its bytes are somebody's file system
        raise OSError(errno.ENOTBLK, "it is a disk (a block device), not a file", str(path))
    if stat.S_ISSOCK(mode):
        raise OSError(errno.ENXIO, "it is a socket, not a file", str(path))
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _stream(path: Path, write: Callable[[BinaryIO], None]) -> None:
    with tempfile.TemporaryFile() as draft:
        write(draft)
        draft.seek(0)
        try:
            # Without waiting: until a pipe has a reader, all ranks would wait for it.
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENXIO:
                raise OSError(errno.ENXIO, "it is a pipe that nobody reads", str(path)) from error
            raise
        with open(fd, "wb", buffering=0) as stream:
            os.set_blocking(fd, True)
            while block := memoryview(draft.read(_BLOCK_BYTES)):
                while block:
                    block = block[stream.write(block) :]


def _write_unnamed(path: Path, write: Callable[[BinaryIO], None]) -> bool:
    """Write `path` by way of a file without a name; return False if that is not possible, with nothing written."""
    if not hasattr(os, "O_TMPFILE"):
        return False
    try:
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in _NAMELESS_REFUSED:
            return False  # if the folder is missing, the other way reports it
        raise
    with open(fd, "w+b") as file:
        own = f"/proc/self/fd/{fd}"
        if not os.path.exists(own):
            return False
        _lock(file)  # this holds while it has a hidden name
        _fill(file, write)
        name = _partial_name(path)
        try:
            # A name can only be taken from another file by renaming. With a descriptor, which an absolute path ignores,
            # Python calls linkat, which follows the link in /proc to the file; its plain link does not.
            os.link(own, name, src_dir_fd=fd, follow_symlinks=True)
        except OSError as error:
            if error.errno in _NAMELESS_REFUSED:
                return False
            raise
        try:
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    return True


@contextmanager
def _named(path: Path) -> Iterator[BinaryIO]:
    """Yield a hidden file beside `path`, locked while it is written; at the end remove it unless it was renamed."""
    while True:
        name = _partial_name(path)
        with open(name, "x+b") as file:
            try:
                _lock(file)
                if os.fstat(file.fileno()).st_nlink == 0:
                    continue  # it was taken for an abandoned one, in the moment before it was locked
                yield file
                return
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(name)


def _lock(file: BinaryIO) -> None:
    with suppress(OSError):  # without locks on this file system nobody removes it either
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)


def _partial_name(path: Path) -> Path:
    return path.with_name(f".{path.name[:_NAME_CHARACTERS]}.{secrets.token_hex(4)}.partial")


def _fill(file: BinaryIO, write: Callable[[BinaryIO], None]) -> None:
    write(file)
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make new names in a folder durable: on most file systems a name is not before its folder is."""
    try:
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise NotDurableError(error.errno, error.strerror, str(directory)) from error
