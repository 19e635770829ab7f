"""Find and create a job's key: in a file, an environment variable or the user's configuration directory, or typed in.

The key is never passed on a command line, which every user of the machine can read with `ps`.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from phalanx._base.deadline import Deadline
from phalanx._comm.control.key import Key
from phalanx.errors import AuthenticationError

FILE_VARIABLE = "PHALANX_KEY_FILE"
VARIABLE = "PHALANX_KEY"
_MAX_BYTES = 4096
_WRITING_S, _WHOLE_BYTES = 2.0, 52


def default_path(environment: Mapping[str, str]) -> Path:
    """Return the path of the user's own key: `phalanx/key` in XDG_CONFIG_HOME, which defaults to ~/.config."""
    folder = environment.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(folder):  # the XDG specification ignores relative paths
        folder = os.path.join(environment.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(folder, "phalanx", "key")


def find_key(path: str | os.PathLike[str] | None = None, environment: Mapping[str, str] = os.environ) -> Key | None:
    """Return the job's key: from the file `path`, PHALANX_KEY_FILE, PHALANX_KEY, or the user's own file; else None.

    Raises:
        AuthenticationError: `read_key` fails for the file, or PHALANX_KEY holds no valid key.
    """
    if path is not None:
        return read_key(path)
    if environment.get(FILE_VARIABLE):
        return read_key(environment[FILE_VARIABLE])
    if environment.get(VARIABLE):
        try:
            return Key.parse(environment[VARIABLE])
        except ValueError as error:
            raise AuthenticationError(f"the key in {VARIABLE}: {error}.") from None
    own = default_path(environment)
    return _read_when_whole(own) if own.is_absolute() and os.path.exists(own) else None


def ask_for_key() -> Key | None:
    """Read the key from the terminal without echo, until it is valid; return None for an empty line or no terminal."""
    import getpass

    if not sys.stdin.isatty():
        return None
    while True:
        text = getpass.getpass("The job's key (as `phalanx key --print` shows it): ")
        if not text.strip():
            return None
        try:
            return Key.parse(text)
        except ValueError as error:
            print(f"{error}.", file=sys.stderr)


def read_key(path: str | os.PathLike[str]) -> Key:
    """Read the key from a file that belongs to this user or to root, and that no other user can access.

    Raises:
        AuthenticationError: the file cannot be read, is not regular or not private, or holds no valid key.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # do not block on a FIFO
    except OSError as error:
        raise AuthenticationError(
            f"the key file {os.fspath(path)}: {error.strerror}.\n`phalanx key {os.fspath(path)}` creates it."
        ) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise AuthenticationError(f"the key file {os.fspath(path)} is not a regular file.")
        if status.st_uid not in (os.geteuid(), 0):
            raise AuthenticationError(
                f"the key file {os.fspath(path)} belongs to another user (uid {status.st_uid}), who knows the key and "
                "can change it.\nCreate your own key: phalanx key"
            )
        if status.st_mode & 0o077:
            raise AuthenticationError(
                f"the key file {os.fspath(path)} can be read or changed by other users of this host (mode "
                f"{stat.S_IMODE(status.st_mode):04o}), so they may know the key.\n"
                f"chmod 600 {os.fspath(path)}   (or, to be safe, create a new key: rm {os.fspath(path)}; phalanx key)"
            )
        text = os.read(fd, _MAX_BYTES)
    finally:
        os.close(fd)
    try:
        return Key.parse(text.decode("ascii"))
    except ValueError as error:
        raise AuthenticationError(f"the key file {os.fspath(path)}: {error}.") from None


def make_key(path: str | os.PathLike[str]) -> tuple[Key, bool]:
    """Read the key from the file `path`, creating it if it is missing; return the key, and whether it is new.

    Hosts that share the directory and call this at the same time all get the same key: one creates the file
    exclusively, and the others wait until it is complete.

    Raises:
        AuthenticationError: `read_key` fails for the file, the file cannot be written, or there is no home directory.
    """
    path = Path(path)
    if path.parts[:1] == ("~",):  # the default path, without a home; a shell expands the `~` that a user types
        raise AuthenticationError(
            "there is no folder for the key: HOME is not set, and this user is not in the user database (getent "
            f"passwd).\nCreate the key in another file (phalanx key FILE), and name that file in {FILE_VARIABLE}."
        )
    if os.path.exists(path):
        return _read_when_whole(path), False
    key = Key.generate()
    draft = path.with_name(f".{path.name}-{os.urandom(8).hex()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w") as file:
                print(key, file=file, flush=True)
                os.fsync(fd)
            try:
                os.link(draft, path)  # fails if the file exists, so a key is never overwritten
            except FileExistsError:
                return _read_when_whole(path), False
            except OSError:  # a file system without hard links
                if not _copy_exclusively(draft, path):
                    return _read_when_whole(path), False
        finally:
            os.unlink(draft)
    except OSError as error:
        raise AuthenticationError(f"the key file {path} cannot be written: {error.strerror}.") from None
    return read_key(path), True


def _read_when_whole(path: Path) -> Key:
    """Read the key in `path`; wait up to two seconds for another process to finish writing it."""
    deadline = Deadline.after(_WRITING_S)
    while True:
        was_whole = path.stat().st_size >= _WHOLE_BYTES  # before reading: it may become complete afterwards
        try:
            return read_key(path)
        except AuthenticationError:
            if deadline.passed or was_whole:
                raise
            time.sleep(0.01)


def _copy_exclusively(draft: Path, path: Path) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    with open(fd, "wb") as file:
        file.write(draft.read_bytes())
        file.flush()
        os.fsync(fd)
    return True
