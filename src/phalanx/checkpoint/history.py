"""`History` keeps a run's checkpoints in one folder: it lists them, adds new ones, and removes old ones.

    runs/a/
        00000007-step-300/      the seventh save of this folder: a complete checkpoint
        00000008-step-400/
        latest -> 00000008-step-400
        .step-500.3fa9c2d1.partial/    being written, or left by a writer that died: the next save removes it

A checkpoint's folder gets its name when the checkpoint is complete, in this order:

    make .partial    write files    fsync each    manifest    fsync it and the folder    rename    fsync runs/a   latest
    |______________ killed here: only a hidden folder is left ________________________|  |_ killed here: it is saved __|

A name begins with the save's number, since steps may repeat: a run that resumes from step 300 saves step 400 again.
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
from phalanx.checkpoint.atomic import PARTIAL, NotDurableError, sync_directory
from phalanx.checkpoint.best import Best, choose_outdated
from phalanx.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from phalanx.errors import CheckpointError

LATEST = "latest"
_NAME = re.compile(r"(\d{8,})-step-(\d+)")
_ENDING_S, _POLL_S = 0.5, 0.01  # how long to wait until the kernel has ended a writer, and how often to check


@dataclass(frozen=True, order=True)
class CheckpointEntry:
    """`CheckpointEntry` is one checkpoint of a folder, parsed from its name."""

    number: int
    step: int
    path: Path


def explain_renamed(path: Path, manifest: Manifest) -> str | None:
    """Return a sentence if a checkpoint's folder was renamed; None if it was not, or if its name has no step."""
    named = _NAME.fullmatch(path.resolve().name)
    if named is None or int(named[2]) == manifest.step:
        return None
    return (
        f"{path} is named for step {int(named[2])}, but is the checkpoint of step {manifest.step}: it was renamed. "
        "Restore its name, or choose a name without a step"
    )


class Draft:
    """`Draft` is a checkpoint that is being written: a hidden folder, locked while the draft is open.

    Without `fd`, another rank owns the folder, and this rank writes its part into it.
    """

    max_poll_s = 0.1  # the longest pause between two checks for other ranks' reports

    def __init__(self, history: History, path: Path, fd: int = -1) -> None:
        self.path, self.name = path, path.name
        self._history, self._fd, self._is_first = history, fd, fd >= 0

    def send(self) -> None:
        """Do nothing: the files are already in their folder."""

    def report(self, name: str, content: str) -> None:
        """Write a small file for rank 0, atomically."""
        draft = self.path / f"{name}.draft"
        draft.write_text(content)
        os.rename(draft, self.path / name)

    def read_report(self, name: str) -> str:
        """Return the file that another rank has written for rank 0."""
        return (self.path / name).read_text()

    def missing(self, names: Collection[str]) -> list[str]:
        """Return the names that no rank has written yet."""
        return [name for name in names if not os.path.exists(self.path / name)]

    def remove_reports(self, names: Collection[str]) -> None:
        """Remove the files that ranks have written for rank 0."""
        for name in names:
            (self.path / name).unlink()

    def commit(self, manifest: Manifest) -> Path:
        """Give the checkpoint its name, durably, and return its path. Its files must be synchronised already.

        Raises:
            OSError: the disk failed; only this draft has changed.
            NotDurableError: the draft's folder could not be synchronised, and only this draft has changed; or the
                history's folder could not, and the checkpoint is in place, but may not survive a power cut.
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
            except OSError as error:  # another job, or rank 0 of another group, has used the number
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
    """`History` keeps the newest `keep` checkpoints in `folder`, and the best; all if `keep` is None."""

    def __init__(self, folder: Path, keep: int | None, best: Best | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.best = best

    def entries(self) -> list[CheckpointEntry]:
        """Return all checkpoints, the latest first; an empty list if the folder does not exist.

        Raises:
            OSError: the folder exists, but cannot be read.
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
        """Return this rank's part of the draft that rank 0 has created."""
        return Draft(self, self.folder / name)

    def next_number(self) -> int:
        entries = self.entries()
        return entries[0].number + 1 if entries else 1

    def draft(self, step: int) -> Draft:
        """Create a hidden folder to write into, and its parent if missing; remove the drafts of dead writers.

        Raises:
            OSError: the disk failed, or permission was denied.
        """
        _make(self.folder)
        self.remove_abandoned()
        while True:
            path = self._hidden(f"step-{step}")
            path.mkdir()
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # another process removed it as abandoned
            _lock(fd)
            if os.fstat(fd).st_nlink > 0 and os.path.exists(path):
                return Draft(self, path, fd)
            os.close(fd)

    def point_latest(self, path: Path) -> None:
        """Make `latest` a link to this checkpoint, for users and for torch.load; `entries` does not need it."""
        link = self._hidden(LATEST)
        with contextlib.suppress(OSError):  # the file system has no links, or the user has a folder of this name
            os.symlink(path.name, link)
            try:
                os.replace(link, self.folder / LATEST)
            except OSError:
                os.unlink(link)
        with contextlib.suppress(NotDurableError):  # losing the link does no harm
            sync_directory(self.folder)

    def remove_old(self) -> None:
        """Remove outdated checkpoints and the drafts of lost ranks; a checkpoint that cannot be removed stays."""
        for entry in choose_outdated(self.entries(), self.keep, self.best, self.metrics_of):
            hidden = self._hidden(entry.path.name)
            with contextlib.suppress(OSError):
                os.rename(entry.path, hidden)  # atomically: a kill during the removal must not leave half a checkpoint
                shutil.rmtree(hidden, ignore_errors=True)
        # A lost rank's process may have ended only after this save began.
        Deadline.after(_ENDING_S).wait_until(lambda: not self.remove_abandoned(), _POLL_S)

    def metrics_of(self, entry: CheckpointEntry) -> Mapping[str, float]:
        """Return the metrics of a checkpoint; an empty dict if the checkpoint is damaged."""
        try:
            return read_manifest(entry.path).metrics
        except CheckpointError:
            return {}

    def remove_abandoned(self) -> bool:
        """Remove the hidden folders of dead writers; return whether a folder is still locked.

        A killed writer keeps its lock until the kernel has ended it and freed its memory.
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
            yield from (self.folder / e.name for e in entries if PARTIAL.fullmatch(e.name))

    def _hidden(self, name: str) -> Path:
        return self.folder / f".{name}.{secrets.token_hex(4)}.partial"


def _make(folder: Path) -> None:
    """Create a folder and its parents, durably: a power cut must not lose a folder that has checkpoints."""
    if os.path.isdir(folder):
        return
    if not os.path.exists(folder.parent):
        _make(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_directory(folder.parent)


def _lock(fd: int) -> None:
    with contextlib.suppress(OSError):  # on a file system without locks, no process removes the folder either
        fcntl.flock(fd, fcntl.LOCK_EX)
