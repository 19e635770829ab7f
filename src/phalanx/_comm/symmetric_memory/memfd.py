"""Create anonymous memory that several processes share, and that needs no cleanup, however any of them dies.

The memory is a `memfd`. If the kernel has no memfds, or a seccomp filter forbids them, it is an unlinked file in
/dev/shm or else in the directory for temporary files. That file system may be small, and writing more than it can hold
would raise SIGBUS, so memory is reserved before it is written. For the same reason the size of a mapped memfd is
sealed: no process that has it open can shrink it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx._base.descriptors import describe_limit
from phalanx.errors import PhalanxError


@dataclass(frozen=True)
class SparseFile:
    """A `SparseFile` is an anonymous file whose pages are allocated when touched; call `reserve` before that."""

    fd: int
    in_folder: str = ""

    def reserve(self, offset: int, nbytes: int) -> None:
        """Make sure that these bytes can be written. Do nothing for a memfd, which only the machine's memory limits.

        Raises:
            PhalanxError: the file system has no room for them.
        """
        if not self.in_folder or nbytes == 0:
            return
        try:
            os.posix_fallocate(self.fd, offset, nbytes)
        except OSError as error:
            raise PhalanxError(f"{nbytes} bytes in {self.in_folder}: {error.strerror}") from None


@contextlib.contextmanager
def memory(name: str, nbytes: int) -> Iterator[int]:
    """Yield the descriptor of `nbytes` of anonymous memory, which lives while a process has it open or mapped.

    Raises:
        PhalanxError: there is neither a memfd nor a directory with room; the message gives the reasons.
    """
    with _first_that_works(name, nbytes, reserved=True) as sparse:
        yield sparse.fd


@contextlib.contextmanager
def sparse_memory(name: str, nbytes: int) -> Iterator[SparseFile]:
    """Yield memory as `memory` does, but reserve nothing: `nbytes` is only address space.

    Raises:
        PhalanxError: as `memory`.
    """
    with _first_that_works(name, nbytes, reserved=False) as sparse:
        yield sparse


def create(name: str) -> int:
    """Return an empty anonymous file that grows as it is written; the caller closes it.

    Raises:
        PhalanxError: as `memory`.
    """
    with _first_that_works(name, 0, reserved=False) as sparse:
        return os.dup(sparse.fd)


def obstacle() -> str:
    """Return why this process cannot create anonymous memory, or ""."""
    try:
        with _first_that_works("phalanx-probe", 0, reserved=False, warns=False):
            return ""
    except PhalanxError as error:
        return str(error)


@contextlib.contextmanager
def _first_that_works(name: str, nbytes: int, *, reserved: bool, warns: bool = True) -> Iterator[SparseFile]:
    problems = []
    is_sealable = nbytes > 0  # a file that grows is read and written, not mapped
    for folder in _folders():
        try:
            fd = _unnamed_file(folder) if folder else open_memfd(name, is_sealable=is_sealable)
        except OSError as error:
            if error.errno == errno.EMFILE:  # the other places will fail, too
                raise PhalanxError(f"no memory can be shared: {error.strerror}. {describe_limit()}") from None
            problems.append(f"{folder or 'memfd_create'}: {error.strerror}")
            continue
        sparse = SparseFile(fd, folder)
        try:
            try:
                os.ftruncate(fd, nbytes)
                if reserved:
                    sparse.reserve(0, nbytes)
            except OSError as error:
                problems.append(f"{nbytes} bytes in {folder or 'a memfd'}: {error.strerror}")
                continue
            except PhalanxError as error:
                problems.append(str(error))
                continue
            if folder and warns:
                _warn_where(folder, problems)
            elif is_sealable and not folder:
                _seal(fd)
            yield sparse
            return
        finally:
            os.close(fd)
    raise PhalanxError(f"no memory can be shared ({'; '.join(problems)})")


def _seal(fd: int) -> None:
    """Seal a memfd's size permanently; holes may still be punched."""
    with contextlib.suppress(OSError):  # a sandbox whose kernel has memfds but no seals
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def _warn_where(folder: str, problems: Sequence[str]) -> None:
    # imported here, because the agent must start in a few milliseconds
    from phalanx._base.log import get_logger, warn_once

    text = f"shared memory is in unnamed files in {folder}, because {'; '.join(problems)}"
    warn_once(get_logger(__name__), text)


def _folders() -> Iterator[str]:
    yield ""  # a memfd
    yield "/dev/shm"
    import tempfile  # imported here, because the agent must start in a few milliseconds

    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:  # there is no writable directory
        return
    yield folder


def open_memfd(name: str, *, is_sealable: bool = False) -> int:
    """Return the descriptor of a new memfd, whose size may be sealed if `is_sealable`.

    Raises:
        OSError: the kernel or this Python's C library has no memfds, or a seccomp filter forbids them.
    """
    if not hasattr(os, "memfd_create"):  # a Python built with a C library older than 2.27
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return os.memfd_create(name, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if is_sealable else 0))


def _unnamed_file(folder: str) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL, 0o600)
    except OSError:  # this file system does not support O_TMPFILE
        import tempfile

        fd, path = tempfile.mkstemp(prefix="phalanx-", dir=folder)
        os.unlink(path)
        return fd
