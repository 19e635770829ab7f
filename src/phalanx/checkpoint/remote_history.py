"""`RemoteHistory` keeps a run's checkpoints at an fsspec address; the manifest, put last, completes each checkpoint.

    s3://bucket/runs/a/
        00000007-step-300-5be2ff01/     the seventh save: a checkpoint, since it has its manifest
            state.pt
            checkpoint.json
        00000008-step-400-3fa9c2d1/     being written, or left by a dead writer
            .writing                    names the writing process; also present during a removal
        latest                          the name of the newest checkpoint, for users

    files, written into a folder here   put each   parts of all ranks   put checkpoint.json   latest   remove old ones
    |________________ killed here: objects without a manifest are left __________________|  |__ killed here: it is saved

The only requirement is that the store puts an object atomically. The next save removes a dead writer's objects: at
once if its process is known to have ended, otherwise once nothing has been put there for an hour.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from phalanx._base.storage import RemoteFolder
from phalanx._comm.rendezvous.rank_info import host_identity
from phalanx._comm.symmetric_memory.watch import ProcessId
from phalanx.checkpoint.best import Best, choose_outdated
from phalanx.checkpoint.history import LATEST, CheckpointEntry
from phalanx.checkpoint.manifest import MANIFEST, Manifest
from phalanx.checkpoint.peers import Peers
from phalanx.errors import CheckpointError

_NAME = re.compile(r"(\d{8,})-step-(\d+)-[0-9a-f]{8}")
_WRITING = ".writing"
_ABANDONED_S = 3600.0
RETRY_S = 120.0  # a manager may set another limit


class RemoteDraft:
    """`RemoteDraft` is this rank's part of a checkpoint in progress: local files that are then put at an address."""

    max_poll_s = 2.0  # the longest pause between two checks for other ranks' reports

    def __init__(self, remote: RemoteFolder, name: str, *, is_first: bool) -> None:
        self.name = name
        self.path = Path(tempfile.mkdtemp(prefix="phalanx-checkpoint-"))
        self._remote, self._is_first = remote, is_first
        self._sent: set[str] = set()

    def send(self) -> None:
        """Put the files that have not been put yet, and remove them locally.

        Raises:
            Exception: the file system's error, after retrying for the configured time.
        """
        for file in sorted(self.path.iterdir()):
            if file.name not in self._sent:
                self._remote.put(file, f"{self.name}/{file.name}")
                self._sent.add(file.name)
                file.unlink()

    def report(self, name: str, content: str) -> None:
        """Put a small object for rank 0, at the end of this rank's part."""
        self._remote.put_bytes(content.encode(), f"{self.name}/{name}")
        self._clear()

    def read_report(self, name: str) -> str:
        """Return the object that another rank has put for rank 0."""
        return self._remote.get_bytes(f"{self.name}/{name}").decode()

    def missing(self, names: Collection[str]) -> list[str]:
        """Return the names that no rank has put yet."""
        there = self._remote.list(self.name)
        return [name for name in names if f"{self.name}/{name}" not in there]

    def remove_reports(self, names: Collection[str]) -> None:
        """Remove the objects that ranks have put for rank 0."""
        self._remote.remove([f"{self.name}/{name}" for name in names])

    def commit(self, manifest: Manifest) -> str:
        """Complete the checkpoint, and return its address."""
        self._remote.put_bytes(manifest.encode(), f"{self.name}/{MANIFEST}")
        self._clear()
        with contextlib.suppress(Exception):  # the checkpoint is complete without these
            self._remote.put_bytes(self.name.encode(), LATEST)
            self._remote.remove([f"{self.name}/{_WRITING}"])
        return self._remote.shown(self.name)

    def discard(self) -> None:
        """Remove the draft, as far as the network allows."""
        self._clear()
        if self._is_first:
            with contextlib.suppress(Exception):
                names = self._remote.list(self.name)
                if f"{self.name}/{MANIFEST}" not in names:
                    _remove(self._remote, names)

    def _clear(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class RemoteHistory:
    """`RemoteHistory` keeps the newest `keep` checkpoints at `address`, and the best; all if `keep` is None."""

    def __init__(self, address: str, keep: int | None, retry_s: float, best: Best | None = None) -> None:
        self.keep = keep
        self.best = best
        self._metrics: dict[str, Mapping[str, float]] = {}  # metrics by checkpoint: they never change
        self._remote = RemoteFolder(address, retry_s)

    def shown(self, name: str) -> str:
        return self._remote.shown(name)

    def entries(self) -> list[CheckpointEntry]:
        """Return all checkpoints, the latest first.

        Raises:
            Exception: the file system's error, after retrying for the configured time.
        """
        found = []
        for name in self._remote.list():
            folder, _, file = name.partition("/")
            if file == MANIFEST and (match := _NAME.fullmatch(folder)):
                found.append(CheckpointEntry(int(match[1]), int(match[2]), Path(folder)))
        return sorted(found, reverse=True)

    def exists(self, name: str) -> bool:
        return self._remote.exists(f"{name}/{MANIFEST}")

    def draft(self, step: int) -> RemoteDraft:
        """Return a new draft, and remove the drafts of dead writers."""
        objects = self._remote.list()
        matches = filter(None, (_NAME.fullmatch(name.partition("/")[0]) for name in objects))
        number = 1 + max((int(match[1]) for match in matches), default=0)
        name = f"{number:08d}-step-{step}-{secrets.token_hex(4)}"
        self._mark(name)
        with contextlib.suppress(Exception):  # leftovers only use storage
            self._remove_abandoned(name)
        return RemoteDraft(self._remote, name, is_first=True)

    def join(self, name: str) -> RemoteDraft:
        """Return this rank's part of the draft that rank 0 has created."""
        return RemoteDraft(self._remote, name, is_first=False)

    def remove_old(self) -> None:
        """Remove outdated checkpoints; a checkpoint that cannot be removed stays.

        The manifest is removed first: without it the folder is not a checkpoint. Before that, a writer's mark is put:
        if this process is killed during the removal, the next save removes the rest.
        """
        with contextlib.suppress(Exception):
            for entry in choose_outdated(self.entries(), self.keep, self.best, self.metrics_of):
                self._mark(entry.path.name)
                self._remote.remove([f"{entry.path.name}/{MANIFEST}"])
                _remove(self._remote, self._remote.list(entry.path.name))

    def _mark(self, name: str) -> None:
        own = {"host": host_identity(), "process": asdict(ProcessId.of_self())}
        self._remote.put_bytes(json.dumps(own).encode(), f"{name}/{_WRITING}")

    def metrics_of(self, entry: CheckpointEntry) -> Mapping[str, float]:
        """Return the metrics of a checkpoint; an empty dict if the checkpoint is damaged.

        Raises:
            Exception: the file system's error, after retrying for the configured time.
        """
        name = entry.path.name
        if name not in self._metrics:
            try:
                self._metrics[name] = Manifest.decode(self._remote.get_bytes(f"{name}/{MANIFEST}")).metrics
            except (FileNotFoundError, ValueError):
                self._metrics[name] = {}
        return self._metrics[name]

    def _remove_abandoned(self, own: str) -> None:
        objects = self._remote.list()
        folders: dict[str, list[str]] = {}
        for name in objects:
            if _NAME.fullmatch(folder := name.partition("/")[0]):
                folders.setdefault(folder, []).append(name)
        now = objects[f"{own}/{_WRITING}"].modified_s
        for folder, names in folders.items():
            if folder == own or f"{folder}/{MANIFEST}" in names:
                continue
            latest = [objects[name].modified_s for name in names]
            is_old = now is not None and all(at is not None and now - at > _ABANDONED_S for at in latest)
            if is_old or (f"{folder}/{_WRITING}" in names and self._has_ended(folder)):
                _remove(self._remote, names)

    def _has_ended(self, folder: str) -> bool:
        """Return whether the writing process ran on this host and has ended."""
        writer = json.loads(self._remote.get_bytes(f"{folder}/{_WRITING}"))
        return writer["host"] == host_identity() and ProcessId(**writer["process"]).has_ended()

    # -- reading -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self, peers: Peers, name: str) -> Iterator[Path]:
        """Yield a local folder with the files that this host's ranks read; remove it at the end. All ranks call this.

        Only rank 0 downloads the file of a whole checkpoint. Each host downloads all files of a sharded checkpoint,
        once.
        """
        manifest: Manifest | None = None
        problem: str | None = None
        if peers.is_first:
            try:
                manifest = Manifest.decode(self._remote.get_bytes(f"{name}/{MANIFEST}"))
            except FileNotFoundError:
                problem = f"{self.shown(name)} is not there"
            except ValueError as error:
                problem = f"{self.shown(name)}/{MANIFEST} is damaged: {error}"
            except Exception as error:
                problem = f"{self.shown(name)} could not be read: {type(error).__name__}: {error}"
        problem, manifest = peers.broadcast((problem, manifest))
        if manifest is None:
            raise DownloadError(f"{peers.what}: {problem}.")
        hosts = peers.all_gather(host_identity())
        mine = [rank for rank, host in enumerate(hosts) if host == hosts[peers.rank]]
        folders = [_make_folder(name, manifest)] if mine[0] == peers.rank else []
        try:
            shared = peers.all_gather(folders[0] if folders else None)[mine[0]]
            assert shared is not None
            files = self._files_for(manifest, peers, mine)
            if not (shared / MANIFEST).exists():  # ranks of one host may have different folders for temporary files
                folders.append(shared := _make_folder(name, manifest))
                files = list(manifest.files)
            problem = self._download(name, files, shared)
            peers.agree(problem and f"{peers.what}: {problem}.", kind=DownloadError)
            yield shared
            peers.all_gather(None)  # all ranks have finished reading
        finally:
            for folder in folders:
                shutil.rmtree(folder.parent, ignore_errors=True)

    def _files_for(self, manifest: Manifest, peers: Peers, mine: list[int]) -> list[str]:
        if manifest.kind == "whole":
            return list(manifest.files) if peers.is_first else []
        return sorted(manifest.files)[mine.index(peers.rank) :: len(mine)]

    def _download(self, name: str, files: list[str], folder: Path) -> str | None:
        try:
            for file in files:
                self._remote.get(f"{name}/{file}", folder / file)
        except FileNotFoundError:
            return f"{self.shown(name)} lacks a file: it is damaged, or was removed while it was read"
        except Exception as error:
            return f"{self.shown(name)} could not be read: {type(error).__name__}: {error}"
        return None


def _remove(remote: RemoteFolder, names: Collection[str]) -> None:
    """Remove the objects of one folder, its mark last: while the mark exists, the next save can remove the rest."""
    marks = [name for name in names if name.endswith(f"/{_WRITING}")]
    if others := [name for name in names if name not in marks]:
        remote.remove(others)
    if marks:
        remote.remove(marks)


def _make_folder(name: str, manifest: Manifest) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="phalanx-checkpoint-")) / name
    folder.mkdir()
    (folder / MANIFEST).write_bytes(manifest.encode())
    return folder


class DownloadError(CheckpointError):
    """A checkpoint could not be downloaded."""


@contextlib.contextmanager
def download(address: str, retry_s: float) -> Iterator[tuple[Path, str, tuple[str, ...]]]:
    """Download a checkpoint; yield its local path, its own address, and the names of the folder's older checkpoints.

    The address is that of a checkpoint, of a folder of checkpoints (the latest is used), or of a single object.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    address = address.rstrip("/")
    parent, _, name = address.rpartition("/")
    with contextlib.ExitStack() as stack:
        try:
            objects = RemoteFolder(address, retry_s).list()
            entries = [] if "" in objects or MANIFEST in objects else RemoteHistory(address, None, retry_s).entries()
            if not entries and not objects.keys() & {"", MANIFEST}:
                raise CheckpointError(f"{address}: there is no checkpoint there.")
            if "" in objects:
                file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-checkpoint-"))) / name
                RemoteFolder(parent, retry_s).get(name, file)
        except (CheckpointError, ModuleNotFoundError):
            raise
        except Exception as error:
            raise CheckpointError(f"{address} could not be read: {type(error).__name__}: {error}") from error
        if "" in objects:
            yield file, address, ()
            return
    if entries:
        parent, name = address, entries[0].path.name
    history = RemoteHistory(parent, None, retry_s)
    with history.opened(Peers.alone("reading"), name) as path:
        yield path, history.shown(name), tuple(entry.path.name for entry in entries[1:])
