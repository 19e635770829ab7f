"""Create the job's temporary folder, for sockets that Python's multiprocessing leaves behind in killed ranks.

TMPDIR stays the user's: a script's files there may be meant to last, and compilers keep their caches there. The folder
is only for the sockets that multiprocessing creates for a process, and removes at its orderly end, and for our own,
which have a name only while they are created: a rank that is killed at that moment leaves the name.

The agent removes it at the end; if it was killed, the zygote does; if both were, this user's next job does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
from collections.abc import Mapping

from phalanx._job.agent.error_files import is_attempt, remove_empty

# As long as Python's own `pymp-` and eight letters: a socket's path may have 107 bytes, and TMPDIR can be long.
_PREFIX = "phalanx-"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_RANDOM_DIGITS = 5
_MARK = ".phalanx-job"  # in each folder, so that nothing else is ever removed, whatever its name
_MAX_TRIES = 100


class JobFolder:
    """A `JobFolder` is made and locked at construction; `path` is empty if none can be made; the job runs without."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.path, self._lock = "", -1
        for parent in filter(None, (*(environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")), "/tmp", "/var/tmp")):
            with contextlib.suppress(OSError):
                path = _make(os.path.abspath(parent))
                try:
                    self._lock = _lock(path)  # before the mark: a folder with a mark and no lock is a dead job's
                    with open(os.path.join(path, _MARK), "xb"):
                        pass
                except OSError:  # without a lock nobody could find out whether the folder is in use
                    remove(path)
                    raise
                self.path = path
                break

    def remove_others(self) -> None:
        """Remove the folders of this user's jobs whose processes were all killed."""
        if not self.path:
            return
        parent = os.path.dirname(self.path)
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                if name.startswith(_PREFIX) and len(name) == len(_PREFIX) + _RANDOM_DIGITS:
                    _remove_if_dead(os.path.join(parent, name))

    def close(self) -> None:
        """Remove the folder."""
        if self._lock != -1:
            os.close(self._lock)
            self._lock = -1
            remove(self.path)


def remove(path: str) -> None:
    """Remove a job's folder with all in it but the errors that ranks have left, if it is one; never raises."""
    mark = os.path.join(path, _MARK)
    if not path or not os.path.lexists(mark):
        return  # it did not exist, or another process was faster
    with contextlib.suppress(OSError):
        os.unlink(mark)
    remove_empty(path)
    try:
        names = os.listdir(path)
    except OSError:
        return  # it was empty
    import shutil  # here, because it loads three compression libraries, and most folders are empty

    if not any(is_attempt(name) for name in names):
        shutil.rmtree(path, ignore_errors=True)
    for name in names:
        if is_attempt(name):
            continue
        inner = os.path.join(path, name)
        with contextlib.suppress(OSError):
            shutil.rmtree(inner) if os.path.isdir(inner) and not os.path.islink(inner) else os.unlink(inner)


def use_in_rank(path: str) -> None:
    """Use the job's folder `path` in this rank: Python's multiprocessing puts its sockets there, in this process and in
    all that it starts, and so do we.
    """
    from phalanx._base.ipc import private  # here: the agent, which starts in milliseconds, has no use for it

    private.use_place(path)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and path:
        # private, but `multiprocessing.util.get_temp_dir` has looked there since Python 3.3, and children inherit it
        process.current_process()._config["tempdir"] = path


def _make(parent: str) -> str:
    for _ in range(_MAX_TRIES):
        name = _PREFIX + "".join(_DIGITS[byte % len(_DIGITS)] for byte in os.urandom(_RANDOM_DIGITS))
        path = os.path.join(parent, name)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(parent)


def _lock(path: str) -> int:
    """Return a descriptor with the folder's lock; raise OSError if another process has it, or locking fails."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove_if_dead(path: str) -> None:
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return
        os.lstat(os.path.join(path, _MARK))  # raises for a folder of a user's own
        fd = _lock(path)  # raises while its job lives
        try:
            remove(path)
        finally:
            os.close(fd)
