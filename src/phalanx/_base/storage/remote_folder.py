"""A `RemoteFolder` puts, lists, reads and removes whole objects at an address of fsspec (`s3://bucket/runs/a`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from phalanx._base.deadline import Deadline
from phalanx._base.storage.address import split_address
from phalanx._base.storage.retry import is_transient, retry

T = TypeVar("T")

# Errors that a retry cannot fix, besides the operating system's.
LASTING = (ValueError, TypeError, NotImplementedError, AttributeError, KeyError, ImportError, AssertionError)
_OF_CREDENTIALS = frozenset(("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError"))


@dataclass(frozen=True)
class RemoteObject:
    """A `RemoteObject` is an object in a folder: its size, and when it was modified, if the file system reports it.

    `modified_s` is in seconds since the epoch.
    """

    nbytes: int
    modified_s: float | None


class RemoteFolder:
    """A `RemoteFolder` gives access to the objects below `address`.

    An operation that fails with a network error is retried for `retry_s` seconds, with a warning.
    """

    def __init__(self, address: str, retry_s: float) -> None:
        self.address = address.rstrip("/")
        self._retry_s = retry_s
        self._files, self._root = split_address(self.address)
        self._root = self._root.rstrip("/")

    def shown(self, name: str) -> str:
        """Return the address of an object, for messages."""
        return f"{self.address}/{name}" if name else self.address

    def list(self, below: str = "") -> dict[str, RemoteObject]:
        """Return all objects by their names in this folder; an empty dict if the folder does not exist."""

        def find() -> Any:
            self._files.invalidate_cache()
            return self._files.find(self._path(below), detail=True)

        try:
            found = self._retry(find, f"listing {self.shown(below)}")
        except FileNotFoundError:
            return {}
        begin = len(self._root) + 1
        return {path[begin:]: RemoteObject(int(info.get("size") or 0), _modified(info)) for path, info in found.items()}

    def exists(self, name: str) -> bool:
        """Return whether there is such an object."""

        def exists() -> bool:
            self._files.invalidate_cache()
            return bool(self._files.exists(self._path(name)))

        return self._retry(exists, f"looking for {self.shown(name)}")

    def put(self, source: Path, name: str) -> None:
        """Put a file as an object, atomically."""
        self._retry(lambda: self._files.put_file(os.fspath(source), self._path(name)), f"writing {self.shown(name)}")

    def put_bytes(self, content: bytes, name: str) -> None:
        """Put a small object, atomically."""
        self._retry(lambda: self._files.pipe_file(self._path(name), content), f"writing {self.shown(name)}")

    def get(self, name: str, target: Path) -> None:
        """Download an object into a local file.

        Raises:
            FileNotFoundError: there is no such object.
        """
        self._retry(lambda: self._files.get_file(self._path(name), os.fspath(target)), f"reading {self.shown(name)}")

    def get_bytes(self, name: str) -> bytes:
        """Return a small object.

        Raises:
            FileNotFoundError: there is no such object.
        """
        return bytes(self._retry(lambda: self._files.cat_file(self._path(name)), f"reading {self.shown(name)}"))

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; missing ones are not an error."""

        def remove() -> None:
            try:
                self._files.rm([self._path(name) for name in names])
            except FileNotFoundError:
                for name in names:
                    if self._files.exists(self._path(name)):
                        self._files.rm(self._path(name))

        if names:
            self._retry(remove, f"removing {self.shown(names[0])}")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _retry(self, function: Callable[[], T], what: str) -> T:
        return retry(function, what, Deadline.after(self._retry_s), fails_for_now=fails_for_now)


def fails_for_now(error: BaseException) -> bool:
    """Return whether an operation that raised `error`, perhaps an error of fsspec's libraries, may succeed later."""
    if isinstance(error, OSError):
        return is_transient(error)
    return not isinstance(error, LASTING) and type(error).__name__ not in _OF_CREDENTIALS


def _modified(info: dict[str, Any]) -> float | None:
    for key in ("LastModified", "last_modified", "updated", "mtime", "modified", "created"):
        value = info.get(key)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
            except ValueError:
                continue
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
