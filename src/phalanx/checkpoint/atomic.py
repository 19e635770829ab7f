"""Write a file atomically: it appears complete or not at all."""

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

PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial")
# Errors of file systems without anonymous files, or without a way to name one.
_NAMELESS_REFUSED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.EPERM, errno.EXDEV)
# Errors of folders that cannot be synchronised, or not by this user; they are ignored.
_NO_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM, errno.EBADF, errno.EROFS)
# how many characters of the file's name a hidden name repeats at most, because the length of names is limited
_NAME_CHARACTERS = 50
_BLOCK_BYTES = 1 << 20


class NotDurableError(OSError):
    """The file is complete and has its name, but synchronising its folder failed."""


def replace_file(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Replace the file `path` atomically with what `write` writes; the file survives a power cut once this returns.

    The bytes go to an anonymous file in the same folder, which gets its name at the end. If anything fails, or this
    process dies, that file is gone and `path` is unchanged. A symbolic link stays, and its target is replaced. If the
    file system has no anonymous files, a hidden file (`.<name>.<random>.partial`) is used instead. A killed process
    leaves its hidden file behind; the next call for this folder removes all that no running process is writing.

    A pipe or a character device (`/dev/null`, `/dev/stdout`) is not replaced: the complete bytes are written to it.
    `write` may be called a second time, with an empty file.

    Raises:
        NotDurableError: the file is written, but may not survive a power cut.
        OSError: the folder or the disk refused the file; or `path` is a folder, a block device or a socket, or a pipe
            without a reader.
        Exception: any error of `write`.
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
    """Remove the hidden files of dead writers: a running writer holds a lock on its file."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if PARTIAL.fullmatch(entry.name):
                with suppress(OSError):  # another user's file, or in use, or already removed
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
    """Return whether `path` must be written to instead of replaced.

    Raises:
        OSError: `path` can be neither replaced nor written to.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise
        return False  # nothing is there; any other problem is reported when the file is created
    if stat.S_ISBLK(mode):  # a block device may hold a file system
        raise OSError(errno.ENOTBLK, "it is a disk (a block device), not a file", str(path))
    if stat.S_ISSOCK(mode):
        raise OSError(errno.ENXIO, "it is a socket, not a file", str(path))
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _stream(path: Path, write: Callable[[BinaryIO], None]) -> None:
    with tempfile.TemporaryFile() as draft:
        write(draft)
        draft.seek(0)
        try:
            # Do not wait: all ranks would wait until the pipe has a reader.
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
    """Write `path` through an anonymous file; return False, with nothing written, if that is not possible."""
    if not hasattr(os, "O_TMPFILE"):
        return False
    try:
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in _NAMELESS_REFUSED:
            return False  # if the folder is missing, creating the hidden file reports it
        raise
    with open(fd, "w+b") as file:
        own = f"/proc/self/fd/{fd}"
        if not os.path.exists(own):
            return False
        _lock(file)  # kept while the file has a hidden name
        _keep_mode(path, fd)
        _fill(file, write)
        name = _partial_name(path)
        try:
            # Only a rename can replace an existing name, so link to a hidden name first. With `src_dir_fd`, which has
            # no effect on an absolute path, Python calls linkat, which follows the link in /proc to the file; without
            # it, os.link does not.
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
    """Yield a locked hidden file beside `path`; remove it at the end unless it was renamed."""
    while True:
        name = _partial_name(path)
        with open(name, "x+b") as file:
            try:
                _lock(file)
                if os.fstat(file.fileno()).st_nlink == 0:
                    continue  # another process removed it as abandoned just before it was locked
                _keep_mode(path, file.fileno())
                yield file
                return
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(name)


def _keep_mode(path: Path, fd: int) -> None:
    """Give a file the mode of the file that it will replace, if there is one, which may be private or shared."""
    with suppress(OSError):
        os.fchmod(fd, stat.S_IMODE(os.stat(path).st_mode))


def _lock(file: BinaryIO) -> None:
    with suppress(OSError):  # on a file system without locks, no process removes it either
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)


def _partial_name(path: Path) -> Path:
    return path.with_name(f".{path.name[:_NAME_CHARACTERS]}.{secrets.token_hex(4)}.partial")


def _fill(file: BinaryIO, write: Callable[[BinaryIO], None]) -> None:
    write(file)
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make new names in a folder durable: on most file systems a new name is lost until its folder is synchronised."""
    try:
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise NotDurableError(error.errno, error.strerror, str(directory)) from error
