"""Create a temporary folder for the job, so that the sockets of killed ranks are removed with it.

TMPDIR is not changed: a script may want to keep its files there, and compilers keep their caches there. The folder
contains the sockets of Python's multiprocessing, which removes them unless its process is killed; our own sockets,
whose names remain only if a rank is killed while it creates them; and, without a log folder, the ranks' error files.

The agent removes the folder at the end. If the agent is killed, the zygote removes it; if both are, this user's next
job does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
from collections.abc import Mapping

from phalanx._job.agent.error_files import is_attempt, remove_empty

# As long, with its random digits, as Python's `pymp-` with eight letters: a socket's path is limited to 107 bytes.
_PREFIX = "phalanx-"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_RANDOM_DIGITS = 5
_MARK = ".phalanx-job"  # a file in each job's folder; a folder without it is never removed
_MAX_TRIES = 100


class JobFolder:
    """A `JobFolder` is the locked folder of a job. If it cannot be created or locked, `path` is empty."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.path, self._lock = "", -1
        for parent in filter(None, (*(environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")), "/tmp", "/var/tmp")):
            with contextlib.suppress(OSError):
                path = _make(os.path.abspath(parent))
                try:
                    self._lock = _lock(path)  # before the mark: a folder with a mark and no lock belongs to a dead job
                    with open(os.path.join(path, _MARK), "xb"):
                        pass
                except OSError:  # without a lock, other jobs could not detect that the folder is in use
                    remove(path)
                    raise
                self.path = path
                break

    def remove_others(self) -> None:
        """Remove the folders that this user's earlier jobs left behind because all their processes were killed."""
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
    """Remove a job's folder with its contents, except error files of ranks; ignore other folders; never raise."""
    mark = os.path.join(path, _MARK)
    if not path or not os.path.lexists(mark):
        return  # it is not a job's folder, or another process has removed it
    with contextlib.suppress(OSError):
        os.unlink(mark)
    remove_empty(path)
    try:
        names = os.listdir(path)
    except OSError:
        return  # `remove_empty` has removed it
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
    """Use the job's folder `path` for this rank's sockets: Phalanx's, and multiprocessing's here and in children."""
    from phalanx._base.ipc import private  # here, because the agent starts in milliseconds and does not need it

    private.use_place(path)
    process = sys.modules.get("multiprocessing.process")
    if process is not None and path:
        # private, but `multiprocessing.util.get_temp_dir` has read it since Python 3.3, and children inherit it
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
    """Lock the folder; return the descriptor. Raise OSError if another process has the lock, or locking fails."""
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
        os.lstat(os.path.join(path, _MARK))  # raises for any other folder
        fd = _lock(path)  # raises while its job runs
        try:
            remove(path)
        finally:
            os.close(fd)
