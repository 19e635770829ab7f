"""Explain why a checkpoint could not be written, or, before training begins, why none can be."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx._base.storage import RemoteFolder, is_address
from phalanx._base.storage.remote_folder import LASTING
from phalanx.checkpoint.atomic import NotDurableError
from phalanx.checkpoint.background import AbandonedError
from phalanx.checkpoint.blame import describe_unsafe_value
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.remote_history import RETRY_S
from phalanx.checkpoint.whole import UnreadableError

_TRIAL = ".phalanx-trial"


def may_write(folder: Path) -> bool:
    """Return whether this process can create files in `folder`."""
    effective = os.access in os.supports_effective_ids
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK, effective_ids=effective)


def explain_unseen(peers: Peers, folder: Path) -> str:
    """Return why this rank cannot write into the folder that rank 0 has created."""
    host = os.uname().nodename
    try:
        is_there = bool(os.stat(folder))
    except OSError as error:
        is_there = error.errno in (errno.EACCES, errno.EPERM)
    if is_there:
        return (
            f"{peers.what}: rank {peers.rank} on {host} may not write to {folder.parent}. Nothing was written. Save "
            "to a folder that the user of every rank may write to."
        )
    return (
        f"{peers.what}: rank {peers.rank} on {host} does not see the files of rank 0 in {folder.parent}: the hosts do "
        "not share this folder. Nothing was written. Save to a folder on a disk that all hosts mount, or, if rank 0 "
        "holds the whole state, with sharded=False."
    )


def is_lasting(error: Exception) -> bool:
    """Return whether every later save would also fail: the state cannot be saved, or the folder is a file."""
    if isinstance(error, (UnreadableError, pickle.PickleError, FileExistsError)):
        return True
    return not describe_disk_error(error)[0] and isinstance(error, LASTING)


def explain_unwritten(
    peers: Peers,
    folder: Path | str,
    step: int,
    error: Exception,
    state: Mapping[str, Any] | None = None,
    newest: Path | str | None = None,
) -> str:
    """Return a message with the failed operation, its place, the reason, and the newest complete checkpoint."""
    kept = "Earlier checkpoints are unchanged, and so are the objects in training."
    if newest is not None:
        kept += f" The newest is {str(newest).rpartition('/')[2]}."
    fact, advice = describe_disk_error(error)
    if isinstance(error, NotDurableError):
        kept, advice = "The new checkpoint is in place, but a power failure may destroy it.", "Check the disk."
    elif not fact:
        fact = (
            str(error) if isinstance(error, (AbandonedError, UnreadableError)) else f"{type(error).__name__}: {error}"
        )
        value, advice = describe_unsafe_value(state) if state is not None else ("", "")
        fact += value and f" ({value})"
    text = f"{peers.what}: step {step} to {folder} on rank {peers.rank}: {fact}. {kept} {advice}"
    return text.rstrip()


def explain_optimizers_apart(what: str, optimizers_by_rank: Sequence[Mapping[str, Any]]) -> str:
    """Return why optimizers that differ between ranks cannot be saved as one; "" if they are equal.

    `optimizers_by_rank` has the result of `describe_optimizers` by rank.
    """
    for rank, theirs in enumerate(optimizers_by_rank):
        for name in optimizers_by_rank[0]:
            if name not in theirs:
                return (
                    f"{what}: rank {rank} has no optimizer {name!r} in its parts, but rank 0 has. Nothing was written. "
                    "Pass the same parts on every rank."
                )
            if theirs[name] != optimizers_by_rank[0][name]:
                return (
                    f"{what}: {name!r} updates different parameters on rank {rank} than on rank 0 (as with pipeline "
                    "stages), but only rank 0's state would be saved. Nothing was written. Save the model here, and "
                    f"each rank's optimizer in its own file: torch.save({name}.state_dict(), '{name}-{rank}.pt')."
                )
    return ""


def describe_disk_error(error: BaseException) -> tuple[str, str]:
    """Return a description of the disk's error and advice; both "" if `error` is another error."""
    disk = _disk_error(error)
    if disk is None:
        return "", ""
    return disk.strerror or str(disk), _ADVICE.get(disk.errno or 0, "Fix that, or save to another folder.")


def _disk_error(error: BaseException | None) -> OSError | None:
    """Return the disk's own error, which torch.save replaces with an error about positions in its archive."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


_ADVICE = {
    errno.ENOENT: "Create the folder first.",
    errno.EEXIST: "Pass the path of a folder, not of a file.",
    errno.ENOTDIR: "A part of the path is a file: save to another path.",
    errno.EISDIR: "Give the checkpoint a file name.",
    errno.ELOOP: "Fix the symbolic links, or save to another path.",
    errno.ENAMETOOLONG: "Give the checkpoint a shorter file name.",
    errno.EPIPE: "The reader of the pipe has ended; start it again, or save to a file.",
    **dict.fromkeys((errno.ENOTBLK, errno.ENXIO), "Give the checkpoint a file name."),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free space, or save to another disk."),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Save to a folder that this user may write to."),
}


def make_folders(peers: Peers, folders: Mapping[str, str | os.PathLike[str] | None], *, only_try: bool = False) -> None:
    """Create each folder on rank 0, or test writing at its address. All ranks call this.

    The keys are the arguments' names, for errors; None is skipped. `only_try` creates nothing.

    Raises:
        ValueError: folders cannot be created or written to; all of them are listed, on every rank.
    """
    problems = []
    for argument, folder in folders.items() if peers.is_first else ():
        if folder is None:
            continue
        problem = _try_address(str(folder)) if is_address(folder) else _try_folder(Path(folder), only_try=only_try)
        if problem:
            problems.append(f"{argument}={os.fspath(folder)!r} {problem}")
    if problems := peers.broadcast(problems):
        raise ValueError(f"{peers.what}: {' '.join(problems)}")


def _try_folder(folder: Path, *, only_try: bool) -> str:
    """Return why the folder cannot be written to, or ""; create the folder unless `only_try`."""
    try:
        if only_try:
            folder = next(one for one in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(one))
        os.makedirs(folder, exist_ok=True)
    except FileExistsError:
        return "is a file. Pass a folder."
    except OSError as error:
        return f"can't be created: {error.strerror or error}. Pass a folder that this user can create."
    return "" if may_write(folder) else "can't be written to. Pass a folder that this user may write to."


def _try_address(address: str) -> str:
    """Return why no object can be put at the address, or ""; this puts a test object and removes it."""
    try:
        remote = RemoteFolder(address, RETRY_S)
        remote.put_bytes(b"", _TRIAL)
        remote.remove([_TRIAL])
    except ModuleNotFoundError:
        raise
    except Exception as error:
        return f"can't be written to: {type(error).__name__}: {error}. Create the bucket, or check its permissions."
    return ""
