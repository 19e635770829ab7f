"""`CheckpointManager` keeps a run's checkpoints: it saves them, also in the background, and loads the latest."""

from __future__ import annotations

import atexit
import math
import operator
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.log import get_logger, warn_once
from phalanx._base.storage import place_of
from phalanx.checkpoint.background import Saving, wait_together
from phalanx.checkpoint.best import Best, KeepBest
from phalanx.checkpoint.blame import describe_unsafe_value, is_plain
from phalanx.checkpoint.history import CheckpointEntry, Draft, History
from phalanx.checkpoint.manifest import FileRecord, Kind, Manifest
from phalanx.checkpoint.optimizer_fit import note_optimizers
from phalanx.checkpoint.parts import buffer_names, describe_optimizers, is_collective, states_of
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.remote_history import RemoteDraft, RemoteHistory
from phalanx.checkpoint.restore import RestoredCheckpoint, VanishedError, restore
from phalanx.checkpoint.save_work import sharded_work, whole_work
from phalanx.checkpoint.snapshot import SnapshotMemory
from phalanx.checkpoint.tree import NestingError, Tree, is_dtensor
from phalanx.checkpoint.write_problems import (
    explain_optimizers_apart,
    explain_unseen,
    explain_unwritten,
    is_lasting,
    may_write,
)
from phalanx.errors import CheckpointError

if TYPE_CHECKING:  # torch.distributed.checkpoint takes most of a second to import, so import it only when needed
    from phalanx.checkpoint import sharded as sharded_files


_ATTEMPTS = 100  # attempts to read the latest checkpoint while its job saves newer ones and removes it
_AT_EXIT_S = 60.0  # how long a process that ends without `wait` waits for other ranks' parts of its last save


class CheckpointManager:
    """Save and load the checkpoints of a run in `folder`, and keep the newest `keep`.

    manager = CheckpointManager("runs/a", keep=3)
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler, "random": RandomState()}
    restored = manager.load(parts)                  # the latest, if there is one: restored.step
    for step in range(restored.step + 1 if restored else 0, steps):
        ...
        if step % 100 == 0:
            manager.async_save(step, parts)         # waits for a copy in memory only
    manager.wait()

    It works on any backend, and in a single process without a process group. Collective: all ranks of the group call
    `save`, `async_save`, `wait`, `load` and `close`. A checkpoint appears complete or not at all (see `phalanx docs
    checkpoints`). An error is raised on every rank.

    A part is an object with `state_dict` and `load_state_dict` (a model's names are saved without the prefix of
    DistributedDataParallel), or a plain value: a tensor, a number, a string, dicts and lists of them.

    Arguments:
        folder: on a disk that every rank sees, if `sharded`; created if missing. Or an fsspec address, such as
            `s3://bucket/runs/a`: files are first written to the system's temporary directory.
        keep: how many checkpoints to keep; None for all.
        keep_best: ("accuracy", "max", 3): also keep the three with the highest accuracy in the `metrics` of `save`.
        sharded: every rank writes its part, in the files of torch.distributed.checkpoint; otherwise rank 0 writes one
            file of torch.save. None: sharded if the state has a sharded tensor (a DTensor, or a tensor of a
            ZeroRedundancyOptimizer of more than one rank).
        process_group: None for the default group at the time of each call.
        timeout: how many seconds rank 0 waits for the other ranks' parts after it has written its own.
        retry_s: for how many seconds network errors at an address are retried.
        max_failures: how many saves in a row may fail because of the disk, the network or another rank. Each failure
            logs a warning at once, and training continues. One more failure in a row is raised; `wait` and `close`
            raise the last save's failure. With 0 every failure is raised.

    Raises:
        ValueError, TypeError: an argument is invalid.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        keep_best: KeepBest | None = None,
        sharded: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        retry_s: float = 120.0,
        max_failures: int = 3,
    ) -> None:
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(f"CheckpointManager: keep must be 1 or more checkpoints, or None for all, got {keep!r}")
        if not timeout > 0:
            raise ValueError(f"CheckpointManager: timeout must be above zero seconds, got {timeout!r}")
        if not retry_s >= 0:
            raise ValueError(f"CheckpointManager: retry_s must be zero seconds or more, got {retry_s!r}")
        if isinstance(max_failures, bool) or not isinstance(max_failures, int) or max_failures < 0:
            raise ValueError(f"CheckpointManager: max_failures must be 0 or more saves, got {max_failures!r}")
        place = place_of(folder)
        # A script may change the current directory later.
        self.folder: Path | str = Path(os.path.abspath(place)) if isinstance(place, Path) else place
        self.keep, self.keep_best = keep, keep_best
        try:
            best = None if keep_best is None else Best.of(keep_best)
        except ValueError as error:
            raise ValueError(f"CheckpointManager: {error}") from None
        self.sharded = sharded
        self.process_group = process_group
        self.timeout = timeout
        self._failed = FailedSaves(max_failures)
        self._newest: tuple[int, Path | str] | None = None  # the step and place that this process saved or loaded last
        self._history: History | RemoteHistory = (
            RemoteHistory(self.folder, keep, retry_s, best)
            if isinstance(self.folder, str)
            else History(self.folder, keep, best)
        )
        if str(self.folder).startswith("memory://"):
            get_logger(__name__).warning(
                "CheckpointManager: %s is in this process's memory, and is lost when the process ends.", self.folder
            )
        if sharded:
            import phalanx.checkpoint.sharded  # noqa: F401 - here, so that training's first save need not wait for it
        self._memory = SnapshotMemory()
        self._plan: sharded_files.Plan | None = None
        self._saving: Saving | None = None
        self._saving_group: dist.ProcessGroup | None = None
        _open.add(self)

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(
        self, step: int, parts: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None
    ) -> Path | str | None:
        """Write a checkpoint, and return its place once it is complete. All ranks call this.

        Return None if the save failed and `max_failures` allows that. A rank that joins a running job, and is not in
        `elastic.run` yet, saves nothing: it returns the place of the latest checkpoint, or else the folder.

        Arguments:
            metrics: measurements of the parts in their current state, by name; rank 0's are saved. A save without
                the metric of `keep_best` is not among the best.

        Raises:
            CheckpointError: writing failed more than `max_failures` times in a row, or `parts` hold values that cannot
                be saved; on every rank.
            ValueError, TypeError: `step` is not a number from 0 on, or `parts` is not a dict by name.
            MismatchError, PeerLostError, DeadlineError: some rank did not call this.
        """
        peers = self._peers("CheckpointManager.save")
        if peers.is_joining:
            return self.latest() or self.folder
        saving = self._begin(peers, step, parts, metrics, memory=None)
        if saving is None:
            return None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # the thread reads on another stream
            torch.cuda.synchronize()
        self._saving, self._saving_group = saving, peers.group
        saving.start()
        return self._wait_for_save(peers, is_reported=False)

    def async_save(self, step: int, parts: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None) -> None:
        """Start writing a checkpoint of the current state, and return when training may continue. All ranks call this.

        Only one checkpoint is written at a time: this first waits for the previous one. A rank that joins a running
        job saves nothing before it is in the group, as with `save`.

        Cost: a copy in memory of this rank's part, and a few small messages. The memory is kept for the next save.

        Raises:
            CheckpointError: more than `max_failures` saves have failed in a row, or `parts` hold values that cannot be
                saved; on every rank. Later failures of this save are logged at once, and counted by the next call of
                this manager.
            ValueError, TypeError: as `save`.
            MismatchError, PeerLostError, DeadlineError: some rank did not call this.
        """
        peers = self._peers("CheckpointManager.async_save")
        if peers.is_joining:
            return
        saving = self._begin(peers, step, parts, metrics, memory=self._memory)
        if saving is not None:
            self._saving, self._saving_group = saving, peers.group
            saving.start(lambda error: self._failed.report(self._explain(peers, saving.step, error)))

    def wait(self) -> Path | str | None:
        """Wait until the last `async_save` is on the disk, and return its place, or None. All ranks call this.

        If the group was destroyed meanwhile, only rank 0 returns the place, and only rank 0 and the ranks whose part
        failed raise an error.

        Raises:
            CheckpointError: the last save failed; on every rank.
        """
        peers = self._peers("CheckpointManager.wait")
        path = self._wait_for_save(peers)
        self._failed.raise_last(peers)
        return path

    @property
    def is_saving(self) -> bool:
        """Return whether this rank's work for the last save is still in progress."""
        return self._saving is not None and not self._saving.wait(0)

    @property
    def saved_step(self) -> int | None:
        """Return the step of the checkpoint that this process saved, started to save or loaded last, or None."""
        saving = self._saving
        if saving is not None and not saving.error:
            return saving.step
        return None if self._newest is None else self._newest[0]

    def close(self) -> None:
        """Wait as `wait` does, and release the memory for copies. All ranks call this."""
        try:
            self.wait()
        finally:
            self._memory.release()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:  # other ranks may no longer join a collective
            self.give_up()

    def give_up(self) -> None:
        """Abort the current save, unless it is complete already. A rank may call this alone."""
        saving, self._saving, self._saving_group = self._saving, None, None
        if saving is not None:
            saving.abort()
            if saving.error:
                get_logger(__name__).warning("the checkpoint of step %d was aborted: %s", saving.step, saving.error)

    def _peers(self, what: str) -> Peers:
        return Peers(self.process_group, what=what)

    def _begin(
        self,
        peers: Peers,
        step: int,
        parts: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
        memory: SnapshotMemory | None,
    ) -> Saving | None:
        """Return a save that is ready to start; None if rank 0 could not create it and `max_failures` allows that."""
        if isinstance(step, bool) or not hasattr(step, "__index__") or operator.index(step) < 0:
            raise ValueError(f"{peers.what}: step must be an integer of 0 or more, got {step!r}")
        if not isinstance(parts, Mapping):
            raise TypeError(
                f"{peers.what}: parts must be a dict of the objects to save, by name, got a {type(parts).__name__}"
            )
        if wrong := [name for name in parts if not isinstance(name, str)]:
            raise TypeError(f"{peers.what}: the names of parts must be strings, got {wrong[0]!r}")
        best = self._history.best
        if metrics and best is not None and best.metric not in metrics and peers.is_first:
            warn_once(
                _logger,
                f"{peers.what}: metrics has {', '.join(map(repr, metrics))}, but not {best.metric!r}, the metric of "
                "keep_best. A checkpoint without this metric is never among the best, and is removed as it ages.",
            )
        step = operator.index(step)  # NumPy's integers have `__index__`, too
        measured = {name: float(value) for name, value in (metrics or {}).items() if math.isfinite(value)}
        if self._saving is not None and self._saving_group is not peers.group:
            self.give_up()  # the save's group has ended, and perhaps a rank with it: do not wait for its part
        self._wait_for_save(peers)
        collected = collect(peers, parts, sharded=self.sharded)
        kind = collected.kind
        notes = note_optimizers(parts)
        try:
            draft = self._open_draft(peers, step, kind)
        except UnwrittenError as error:
            self._failed.add(peers, error, is_reported=False)
            return None

        def commit(files: Mapping[str, FileRecord]) -> Path | str:
            assert draft is not None
            now = datetime.now(timezone.utc).isoformat(timespec="seconds")
            written = now, str(torch.__version__), dict(files)
            manifest = Manifest(kind, step, peers.world_size, *written, notes.orders, notes.classes, measured)
            path = draft.commit(manifest)
            self._history.remove_old()
            return path

        try:
            if kind == "whole":
                work = whole_work(peers, self.folder, step, collected.state, draft, memory, commit)
            else:
                from phalanx.checkpoint.sharded import plan_save

                assert draft is not None
                tree = Tree.of(collected.state)
                self._plan = plan_save(tree, collected.pinned, peers, self._plan)
                work = sharded_work(peers, self.folder, step, collected.state, tree, self._plan, draft, memory, commit)
            return Saving(work, self.timeout)
        except BaseException:
            if draft is not None:
                draft.discard()
            raise

    def _open_draft(self, peers: Peers, step: int, kind: Kind) -> Draft | RemoteDraft | None:
        """Return the draft to write into: on rank 0, or on every rank if all ranks write; elsewhere None."""
        draft: Draft | RemoteDraft | None = None
        unwritten, cause, name = None, None, ""
        if peers.is_first:
            try:
                draft = self._history.draft(step)
                name = draft.name
            except Exception as error:
                unwritten, cause = self._explain(peers, step, error), error
        try:
            unwritten, name = peers.broadcast((unwritten, name))
            if unwritten is not None:
                raise unwritten from cause
            if kind == "sharded" and draft is None:
                draft = self._history.join(name)
            if kind == "sharded" and peers.world_size > 1 and isinstance(draft, Draft):
                peers.agree(None if may_write(draft.path) else explain_unseen(peers, draft.path))
        except BaseException:
            if draft is not None:
                draft.discard()
            raise
        return draft

    def _wait_for_save(self, peers: Peers, *, is_reported: bool = True) -> Path | str | None:
        """Wait for the current save on all ranks; return its place, or count the failure."""
        if self._saving is not None and self._saving_group is not peers.group:
            if peers.group is None:
                return self._finish_without_group(peers, self._saving)
            self.give_up()
        saving = self._saving
        if saving is None:
            return None
        failure = wait_together(peers, saving, lambda error: self._explain(peers, saving.step, error))
        self._saving = self._saving_group = None
        if failure is None:
            self._failed.reset()
            name = peers.broadcast(str(saving.path).rpartition("/")[2])
            self._newest = saving.step, self._history.shown(name)
            return self._newest[1]
        saving.abort()
        failure.__cause__ = saving.error
        if not isinstance(failure, UnwrittenError):
            raise failure
        self._failed.add(peers, failure, is_reported=is_reported)
        return None

    def _finish_without_group(self, peers: Peers, saving: Saving) -> Path | str | None:
        """Finish a save whose group was destroyed, as at the end of a script; return its place on rank 0.

        Raises:
            CheckpointError: this rank's part failed, or on rank 0 another rank's part.
        """
        saving.finish_alone(self.timeout)
        self._saving = self._saving_group = None
        if saving.error is not None:
            raise self._explain(peers, saving.step, saving.error) from saving.error
        if saving.path is None:
            return None
        self._failed.reset()
        self._newest = saving.step, self._history.shown(str(saving.path).rpartition("/")[2])
        return self._newest[1]

    def _explain(self, peers: Peers, step: int, error: Exception) -> CheckpointError:
        """Return the error to raise if the save of `step` fails: an `UnwrittenError` if a later save may succeed."""
        text = explain_unwritten(peers, self.folder, step, error, newest=self._newest and self._newest[1])
        return CheckpointError(text) if is_lasting(error) else UnwrittenError(text)

    # -- loading -------------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[Path | str]:
        """Return all checkpoints of the folder, the latest first, as this rank sees it."""
        return [self._history.shown(entry.path.name) for entry in self._history.entries()]

    def latest(self) -> Path | str | None:
        """Return the checkpoint saved last, as this rank sees the folder; None if there is none."""
        return next(iter(self.checkpoints()), None)

    def best(self) -> Path | str | None:
        """Return the best checkpoint, as this rank sees the folder; None if none was saved with that metric.

        Raises:
            ValueError: the manager has no `keep_best`.
        """
        best = best_entries(self._history, "CheckpointManager.best")
        return self._history.shown(best[0].path.name) if best else None

    def load(
        self,
        parts: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        best: bool = False,
        map_location: str | torch.device = "cpu",
        strict: bool = True,
        fallback: bool = False,
    ) -> RestoredCheckpoint | None:
        """Load the latest checkpoint, the checkpoint of `step`, or the best one into `parts`. All ranks call this.

        Return the loaded checkpoint; None if there is no checkpoint at all.

        One rank reads each piece, verifies its checksum and sends it to the others; shards of a DTensor are read where
        they are needed, from the files of any number of ranks. A rank whose host does not have the folder receives
        everything from the others. No part is changed before the whole checkpoint has been read and found to fit
        (names, shapes, dtypes, the class of optimizers and the order of their parameters). If the `load_state_dict` of
        a part raises on any rank, every rank raises, and some parts may have changed: create them again. Without
        `parts` the whole state is returned on every rank.

        Arguments:
            parts: the objects to restore, by the name under which they were saved. A plain value is only in the
                returned state.
            best: load the best checkpoint by `keep_best`.
            map_location: the device of the returned tensors. The tensors of parts stay on their devices.
            strict: False loads the entries that fit and reports the others; otherwise missing, unexpected or misshapen
                keys are an error that names them.
            fallback: if a checkpoint is damaged, warn and load the previous one, instead of raising.

        Raises:
            CheckpointError: the checkpoint is damaged or does not fit, there is none of `step`, or the folder cannot be
                read: no part has changed. Or a part refused its state: some parts may have changed. On every rank.
            ValueError: this process does not have the device.
            TypeError: `parts` is not a dict by name.
        """
        peers = self._peers("CheckpointManager.load")
        if best:
            require_best(self._history, peers.what)
        if self._saving is not None:
            self._wait_for_save(peers)
        for attempt in range(_ATTEMPTS):
            names = choose(peers, self._history, self.folder, step, best=best)
            try:
                restored = restore(
                    peers, self._history, names, parts, map_location=map_location, strict=strict, fallback=fallback
                )
            except VanishedError:
                if attempt + 1 == _ATTEMPTS:
                    raise
                continue
            self._newest = self._newest if restored is None else (restored.step, restored.path)
            return restored
        raise AssertionError("unreachable")


_open: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()


def _finish() -> None:
    """Finish the current saves when a script ends without `wait`: their threads would die with the process."""
    for manager in list(_open):
        saving = manager._saving
        if saving is not None:
            saving.finish_alone(_AT_EXIT_S)


def _forget() -> None:
    """Forget the parent's saves in a forked child, which does not have their threads."""
    for manager in list(_open):
        manager._saving = manager._saving_group = None


os.register_at_fork(after_in_child=_forget)
# Run before the executors of concurrent.futures close: resolving a host name needs an executor. In a Python version
# without `_register_atexit`, this runs later, at exit.
vars(threading).get("_register_atexit", atexit.register)(_finish)


def require_best(history: History | RemoteHistory, what: str) -> Best:
    """Return the setting by which `history` keeps the best checkpoints.

    Raises:
        ValueError: the manager, whose method is `what`, has no `keep_best`.
    """
    if history.best is None:
        raise ValueError(
            f"{what}: the manager has no metric to choose the best checkpoint; create the manager with keep_best, "
            "for example keep_best=('accuracy', 'max', 3)"
        )
    return history.best


def best_entries(history: History | RemoteHistory, what: str) -> list[CheckpointEntry]:
    """Return the best checkpoints, the best first, as this rank sees them.

    Raises:
        ValueError: as `require_best`.
    """
    return require_best(history, what).select_best(history.entries(), history.metrics_of)


def choose(peers: Peers, history: History | RemoteHistory, place: object, step: int | None, *, best: bool) -> list[str]:
    """Return the names of the checkpoints to try, in order, as rank 0 sees the folder. All ranks call this.

    Arguments:
        place: the folder or the address, for errors.

    Raises:
        CheckpointError: the folder cannot be read, rank 0 does not see the folder of other ranks, or there is no
            checkpoint of that step or with that metric; on every rank.
    """
    problem, cause, mine, chosen = None, None, list[CheckpointEntry](), list[CheckpointEntry]()
    try:
        mine = history.entries()
        chosen = [entry for entry in mine if step is None or entry.step == step]
        if best and peers.is_first:
            chosen = [entry for entry in best_entries(history, peers.what) if entry in chosen]
    except Exception as error:
        fact = (error.strerror or str(error)) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        problem, cause = f"{peers.what} on rank {peers.rank}: {place}: {fact}.", error
    gathered = peers.all_gather((problem, [entry.path.name for entry in chosen]))
    problem, names = gathered[0]
    if problem is not None:
        raise CheckpointError(problem) from cause
    if best and not names and (steps := peers.broadcast([entry.step for entry in mine])):
        raise CheckpointError(
            f"{peers.what}: no checkpoint in {place} was saved with the metric "
            f"{require_best(history, peers.what).metric!r}; available steps: "
            f"{', '.join(map(str, sorted(set(steps))))}."
        )
    elsewhere = [rank for rank, (_, theirs) in enumerate(gathered) if theirs]
    if not names and elsewhere:
        raise CheckpointError(
            f"{peers.what}: rank {elsewhere[0]} sees checkpoints in {place}, but rank 0, which reads them, "
            "does not: the hosts do not share this folder. Mount the folder on rank 0's host, or run rank 0 on the "
            "host that has it."
        )
    if not names and step is not None:
        steps = peers.broadcast(sorted({entry.step for entry in mine}))
        raise CheckpointError(
            f"{peers.what}: there is no checkpoint of step {step} in {place}; available steps: "
            f"{', '.join(map(str, steps)) or 'none'}."
        )
    return names


@dataclass(frozen=True)
class CollectedState:
    """`CollectedState` is the state that a rank saves.

    `pinned` are the names of values that may differ between ranks; rank 0's are saved.
    """

    state: dict[str, Any]
    kind: Kind
    pinned: set[str]


def collect(peers: Peers, parts: Mapping[str, Any], *, sharded: bool | None) -> CollectedState:
    """Collect the state of all parts, and decide how all ranks write it. All ranks call this.

    Arguments:
        sharded: every rank writes its part; None decides by the state.

    Raises:
        CheckpointError: a part has no state, or the parts cannot be saved in this way; on every rank.
    """
    problem: str | None = None
    cause: Exception | None = None
    state: dict[str, Any] = {}
    without_values = ""
    pinned: set[str] = set()
    is_sharded = sharded
    if is_sharded is None:
        is_sharded = any(hasattr(part, "shard_state_dict") and peers.world_size > 1 for part in parts.values())
    together = {name: part for name, part in parts.items() if peers.world_size > 1 and is_collective(part)}
    try:
        pinned = buffer_names(parts)
        state = states_of({n: part for n, part in parts.items() if n not in together}, peers, sharded=is_sharded)
    except Exception as error:
        problem, cause = f"{peers.what} on rank {peers.rank}: {type(error).__name__}: {error}", error
    if together:  # a rank that fails alone must not leave the others in a part's collective
        peers.agree(problem, cause)
    try:
        if problem is None:
            state |= states_of(together, peers, sharded=is_sharded)
            state = {name: state[name] for name in parts}
        leaves = Tree.of(state).leaves
        has_dtensor = any(is_dtensor(leaf) for leaf in leaves.values())
        if has_dtensor and sharded is False and peers.world_size > 1:
            problem = (
                f"{peers.what}: the state holds tensors that are sharded over ranks (DTensor), but with sharded=False "
                "only rank 0's shard would be written. Remove sharded=False."
            )
        is_sharded = is_sharded or (has_dtensor and sharded is None)
        if peers.is_first and not is_plain(state):
            value, advice = describe_unsafe_value(state)
            problem = (
                f"{peers.what} on rank 0: {value}, which could not be loaded again. Nothing was written. {advice}"
            ).rstrip()
        without_values = next((name for name, leaf in leaves.items() if _has_no_values(leaf, name, pinned, peers)), "")
    except NestingError as error:
        problem, cause = (
            f"{peers.what} on rank {peers.rank}: {error}. Nothing was written. Save a state without such nesting.",
            error,
        )
    except Exception as error:
        problem, cause = f"{peers.what} on rank {peers.rank}: {type(error).__name__}: {error}", error
    gathered = peers.all_gather((problem, is_sharded, describe_optimizers(parts), without_values))
    first = next((text for text, *_ in gathered if text is not None), None)
    if first is not None:
        raise CheckpointError(first) from cause
    if apart := explain_optimizers_apart(peers.what, [optimizers for *_, optimizers, _ in gathered]):
        raise CheckpointError(apart)
    kind: Kind = "sharded" if any(is_sharded for _, is_sharded, *_ in gathered) else "whole"
    if kind == "sharded" and (empty := [(rank, name) for rank, (*_, name) in enumerate(gathered) if name]):
        rank, name = empty[0]
        raise CheckpointError(
            f"{peers.what}: {name!r} is on the meta device on rank {rank}, and has no values to write. Nothing was "
            "written. Give it values first (to_empty, then initialization), or leave it out of the parts."
        )
    differing = [name for name, part in parts.items() if getattr(part, "ranks_differ", False)]
    if kind == "sharded" and differing and peers.world_size > 1:
        raise CheckpointError(
            f"{peers.what}: with {differing[0]!r}, ranks train separate models, which a sharded checkpoint would mix. "
            "Save with sharded=False and a CheckpointManager for each rank (with its own process_group of one rank, "
            f"and its own folder); or call finish() first, and leave {differing[0]!r} out of the parts."
        )
    return CollectedState(state, kind, pinned)


def _has_no_values(leaf: object, name: str, pinned: set[str], peers: Peers) -> bool:
    """Return whether `leaf` is a tensor on the meta device that this rank may have to write."""
    return isinstance(leaf, Tensor) and leaf.is_meta and (peers.is_first or name not in pinned)


_logger = get_logger(__name__)


class UnwrittenError(CheckpointError):
    """The disk, the network or another rank prevented writing a checkpoint: a later save may succeed."""


class FailedSaves:
    """`FailedSaves` counts saves that fail in a row, and raises once there are more than `allowed`."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self._count = 0
        self._last: str | None = None  # why the last save failed, if it did

    def reset(self) -> None:
        self._count, self._last = 0, None

    def report(self, error: CheckpointError) -> None:
        """Log, on the thread of a save, that the save failed and what happens next."""
        is_allowed = isinstance(error, UnwrittenError) and self._count < self.allowed
        _logger.warning(
            "%s %s", error, self._describe_outlook(self._count + 1) if is_allowed else "The next call raises this."
        )

    def add(self, peers: Peers, error: UnwrittenError, *, is_reported: bool) -> None:
        """Count a failed save. All ranks call this.

        Raises:
            CheckpointError: more than `allowed` have failed in a row.
        """
        self._count = peers.broadcast(self._count) + 1  # a rank that joined later has counted fewer
        if self._count > self.allowed:
            self._last = None
            more = f" {self._count} saves in a row have failed (max_failures={self.allowed})." if self.allowed else ""
            raise CheckpointError(f"{error}{more}") from error.__cause__
        self._last = str(error)
        if peers.is_first and not is_reported:
            _logger.warning("%s %s", error, self._describe_outlook(self._count))

    def raise_last(self, peers: Peers) -> None:
        """Raise if the last save failed. All ranks call this.

        Raises:
            CheckpointError: the last save failed.
        """
        last, self._last = peers.broadcast(self._last), None
        if last is not None:
            raise CheckpointError(last)

    def _describe_outlook(self, count: int) -> str:
        so_far = "" if count == 1 else f" (earlier failed saves: {count - 1})"
        return (
            f"Training continues, and the next save is attempted as usual{so_far}; up to {self.allowed} saves in a row "
            "may fail (max_failures)."
        )
