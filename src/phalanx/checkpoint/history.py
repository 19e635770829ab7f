"""`History` keeps the checkpoints of a run in one folder: it lists them, adds a new one, and removes old ones.

    runs/a/
        00000007-step-300/      the seventh save of this folder: a checkpoint, whole
        00000008-step-400/
        latest -> 00000008-step-400
        .step-500.3fa9c2d1.partial/    being written, or left by a writer that died: the next save removes it

A checkpoint is a folder that has its name because it was complete, in this order:

    make .partial    write files    fsync each    manifest    fsync it and the folder    rename    fsync runs/a   latest
    |____________ killed here: nothing but a hidden folder is left ___________________|  |__ killed here: it is there _|

The number comes first, since the latest is the one saved last: a run that goes back to step 300 saves 400 again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx._base.deadline import Deadline
from phalanx.checkpoint.atomic import NotDurableError, sync_directory
from phalanx.checkpoint.best import Best, choose_outdated
from phalanx.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from phalanx.errors import CheckpointError

LATEST = "latest"
_NAME = re.compile(r"(\d{8,})-step-(\d+)")
_ENDING_S, _LOOK_S = 0.5, 0.01  # what the kernel may take to end a writer
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial")


@dataclass(frozen=True, order=True)
class CheckpointEntry:
    """`CheckpointEntry` is one checkpoint of a folder, known by its name only."""

    number: int
    step: int
    path: Path


def explain_renamed(path: Path, manifest: Manifest) -> str | None:
    """Return in words why the name of a checkpoint is not its own; None if it is, or if it names no step."""
    named = _NAME.fullmatch(path.resolve().name)
    if named is None or int(named[2]) == manifest.step:
        return None
    return (
        f"{path} has the name of step {int(named[2])}, and it is the checkpoint of step {manifest.step}: somebody has "
        "renamed it. Give it its name again, or one without a step"
    )


class Draft:
    """`Draft` is a checkpoint that is being written: a hidden folder, locked as long as this is open.

    Without `fd` the folder is another rank's, and this rank has its part in it.
    """

    look_at_most_s = 0.1  # how often one looks at most for what other ranks tell

    def __init__(self, history: History, path: Path, fd: int = -1) -> None:
        self.path, self.name = path, path.name
        self._history, self._fd, self._is_first = history, fd, fd >= 0

    def send(self) -> None:
        """Do nothing: the files are in their folder already."""

    def tell(self, name: str, content: str) -> None:
        """Write a small file for rank 0, whole or not at all."""
        draft = self.path / f"{name}.draft"
        draft.write_text(content)
        os.rename(draft, self.path / name)

    def hear(self, name: str) -> str:
        """Return what another rank has written for rank 0."""
        return (self.path / name).read_text()

    def missing(self, names: Collection[str]) -> list[str]:
        """Return those of the names that no rank has written yet."""
        return [name for name in names if not os.path.exists(self.path / name)]

    def forget(self, names: Collection[str]) -> None:
        """Remove what ranks have written for rank 0."""
        for name in names:
            (self.path / name).unlink()

    def commit(self, manifest: Manifest) -> Path:
        """Give the checkpoint its name, durably; return its path. Whoever wrote its files has synchronised them.

        Raises:
            OSError: the disk refused; nothing has changed but this draft.
            NotDurableError: the checkpoint is in place, and may not survive a power cut.
        """
        with (self.path / MANIFEST).open("xb") as file:
            file.write(manifest.encode())
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self.path)
        history = self._history
        number = history.next_number()
        while True:
            path = history.folder / f"{number:08d}-step-{manifest.step}"
            try:
                os.rename(self.path, path)
                break
            except OSError as error:  # another job, or another rank 0 of this one, has taken the number
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                number += 1
        self.close()
        sync_directory(history.folder)
        history.point_latest(path)
        return path

    def discard(self) -> None:
        """Remove the draft, on rank 0."""
        if self._is_first:
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class History:
    """`History` keeps the checkpoints in `folder`: the newest `keep` and the best; all if `keep` is None."""

    def __init__(self, folder: Path, keep: int | None, best: Best | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.best = best

    def entries(self) -> list[CheckpointEntry]:
        """Return all checkpoints, the latest first. A folder that does not exist has none.

        Raises:
            OSError: the folder exists, and may not be read.
        """
        found = []
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    match = _NAME.fullmatch(entry.name)
                    if match and entry.is_dir(follow_symlinks=False):
                        found.append(CheckpointEntry(int(match[1]), int(match[2]), self.folder / entry.name))
        except FileNotFoundError:
            return []
        return sorted(found, reverse=True)

    def shown(self, name: str) -> Path:
        return self.folder / name

    def exists(self, name: str) -> bool:
        return os.path.exists(self.folder / name)

    @contextlib.contextmanager
    def opened(self, peers: object, name: str) -> Iterator[Path]:
        yield self.folder / name

    def join(self, name: str) -> Draft:
        """Return another rank's part of the checkpoint that rank 0 has begun."""
        return Draft(self, self.folder / name)

    def next_number(self) -> int:
        entries = self.entries()
        return entries[0].number + 1 if entries else 1

    def draft(self, step: int) -> Draft:
        """Return a new hidden folder to write into; makes the folder itself, and removes what dead writers left.

        Raises:
            OSError: the disk or its permissions refused.
        """
        _make(self.folder)
        self.remove_abandoned()
        while True:
            path = self._hidden(f"step-{step}")
            path.mkdir()
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # it was taken for an abandoned one
            _lock(fd)
            if os.fstat(fd).st_nlink > 0 and os.path.exists(path):
                return Draft(self, path, fd)
            os.close(fd)

    def point_latest(self, path: Path) -> None:
        """Make `latest` a link to this checkpoint, for people and for torch.load; `entries` does not need it."""
        link = self._hidden(LATEST)
        with contextlib.suppress(OSError):  # the file system has no links, or a user has a folder of this name
            os.symlink(path.name, link)
            try:
                os.replace(link, self.folder / LATEST)
            except OSError:
                os.unlink(link)
        with contextlib.suppress(NotDurableError):  # it is only a pointer
            sync_directory(self.folder)

    def remove_old(self) -> list[Path]:
        """Remove all checkpoints that need not be kept, and what lost ranks have left; return the checkpoints that were
        removed. One that cannot be removed stays.
        """
        removed = []
        for entry in choose_outdated(self.entries(), self.keep, self.best, self.metrics_of):
            hidden = self._hidden(entry.path.name)
            with contextlib.suppress(OSError):
                os.rename(entry.path, hidden)  # at once: a kill in the middle must not leave half a checkpoint
                removed.append(entry.path)
                shutil.rmtree(hidden, ignore_errors=True)
        # A lost rank may not have ended yet when this save began.
        Deadline.after(_ENDING_S).wait_until(lambda: not self.remove_abandoned(), _LOOK_S)
        return removed

    def metrics_of(self, entry: CheckpointEntry) -> Mapping[str, float]:
        """Return the metrics of a checkpoint; nothing if it is damaged."""
        try:
            return read_manifest(entry.path).metrics
        except CheckpointError:
            return {}

    def remove_abandoned(self) -> bool:
        """Remove the hidden folders of writers that have died; return whether there is one whose writer holds a lock on
        it, which it does as long as the process lives, or the kernel frees its memory.
        """
        is_locked = False
        for path in self._partials():
            with contextlib.suppress(OSError):
                if path.is_symlink():
                    path.unlink()
                    continue
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if os.fstat(fd).st_uid == os.geteuid():
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(path, ignore_errors=True)
                except BlockingIOError:
                    is_locked = True
                finally:
                    os.close(fd)
        return is_locked

    def _partials(self) -> Iterator[Path]:
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            yield from (self.folder / e.name for e in entries if _PARTIAL.fullmatch(e.name))

    def _hidden(self, name: str) -> Path:
        return self.folder / f".{name}.{secrets.token_hex(4)}.partial"


def _make(folder: Path) -> None:
    """Make a folder and those above it, durably: a checkpoint in a folder that a power cut takes is lost."""
    if os.path.isdir(folder):
        return
    if not os.path.exists(folder.parent):
        _make(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_directory(folder.parent)


def _lock(fd: int) -> None:
    with contextlib.suppress(OSError):  # without locks on this file system nobody removes it either
        fcntl.flock(fd, fcntl.LOCK_EX)
