"""Listen on Unix sockets that no other user of the machine can reach or block.

A name in the abstract namespace is visible to all users in /proc/net/unix, and any process can connect to it: a process
that fills its queue blocks the others. A socket's file can be reached only by users who may enter its folder.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from phalanx.errors import PhalanxError

# The same for all processes of a user, whatever their TMPDIR: they find each other here.
_PLACES = ("/tmp", "/dev/shm", "/var/tmp")

_first_place: str | None = None


def use_place(folder: str) -> None:
    """Create the files of listeners in `folder` from now on; the caller removes it with its content."""
    global _first_place
    _first_place = folder or None


def new_listener(backlog: int) -> tuple[socket.socket, int]:
    """Return a listening socket and a descriptor; our processes connect to /proc/<pid>/fd/<descriptor>.

    The socket's file is removed before this returns, so that a later kill leaves nothing behind; a kill during the call
    leaves the file in the folder of `use_place`. The caller closes the socket and the descriptor.

    Raises:
        OSError: this system has no Unix sockets, or no folder for temporary files.
    """
    problem: OSError | None = None
    own = (_first_place,) if _first_place else ()
    for place in (*own, None, *_PLACES):  # a TMPDIR may be read-only, or not support sockets
        try:
            return _listen_in(tempfile.mkdtemp(prefix="phalanx-", dir=place), backlog)  # its mode is 0700
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            problem = problem or error
    assert problem is not None
    raise problem


def _listen_in(folder: str, backlog: int) -> tuple[socket.socket, int]:
    path = os.path.join(folder, "s")
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            _in_folder(path, listener.bind)
            listener.listen(backlog)
            return listener, os.open(path, os.O_PATH | os.O_CLOEXEC)
        except BaseException:
            listener.close()
            raise
    finally:
        if os.path.lexists(path):
            os.unlink(path)
        os.rmdir(folder)


def listen_at(path: str, backlog: int) -> socket.socket:
    """Return a socket that listens at `path` in `folder()`, and replaces the file that a killed process has left.

    Raises:
        OSError: it cannot be created; EADDRINUSE: a running process listens there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        if os.path.lexists(path):
            if _is_listening(path):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)
            os.unlink(path)
        _in_folder(path, listener.bind)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def _is_listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as connection:
        try:
            _in_folder(path, connection.connect)
        except BlockingIOError:  # its queue is full
            return True
        except OSError:
            return False
        return True


def folder() -> Path:
    """Return this user's own folder on this machine, where the user's processes find each other by public names.

    Raises:
        PhalanxError: other users occupy every possible place.
    """
    problems = []
    for place in _PLACES:
        path = Path(place, f"phalanx-{os.getuid()}")
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            status = os.lstat(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            problems.append(f"{path}: not a folder that only this user can enter")
            continue
        return path
    raise PhalanxError(
        f"no private folder for this user could be created ({'; '.join(problems)}).\n"
        "Remove these paths, or set MASTER_ADDR and MASTER_PORT."
    )


def _in_folder(path: str, bind: Callable[[str], None]) -> None:
    """Call `bind`, which may be a socket's `connect`, with a path that may exceed the kernel's limit of 107 bytes."""
    if len(os.fsencode(path)) < 100:
        bind(path)
        return
    fd = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        bind(f"/proc/self/fd/{fd}/{os.path.basename(path)}")
    finally:
        os.close(fd)
