"""Write a checkpoint on rank 0, while the other ranks wait for the outcome."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from phalanx._base.storage import RemoteFolder, place_of
from phalanx.checkpoint.atomic import NotDurableError, replace_file
from phalanx.checkpoint.blame import describe_unsafe_value
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.remote_history import RETRY_S
from phalanx.checkpoint.streams import DiskStream
from phalanx.checkpoint.whole import UnreadableError, refuse_unreadable
from phalanx.checkpoint.write_problems import describe_disk_error


def save_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write `state` to the file `path` atomically; when this returns on any rank, the file is on the disk.

    Collective: every rank of the default process group calls it, not only rank 0. Rank 0's `state` is written while the
    others wait. Without a process group the process writes alone. An existing checkpoint stays until the new one is
    complete. A process that is killed meanwhile leaves no partial checkpoint (see `phalanx docs checkpoints`). `state`
    may hold everything that `load_checkpoint` can read: tensors, numbers, strings, and dicts, lists and tuples of them,
    as PyTorch's `state_dict()` methods return. At an fsspec address (`s3://bucket/run.pt`) the file is one object. A
    pipe or a character device (`/dev/null`) is not replaced: the complete file is written to it.

    Cost: one broadcast of a few hundred bytes; the waiting ranks copy nothing.

    Raises:
        TypeError: `path` is not a path.
        CheckpointError: rank 0 could not write the file (the disk is full, the folder is missing or forbidden), or
            `state` holds objects that could not be loaded; the message names them. It is raised on all ranks. The old
            checkpoint is unchanged, unless the message says that the new one is in place.
        MismatchError, PeerLostError, DeadlineError: some rank did not call this; if rank 0 did, the file is written.
    """
    place = place_of(path)  # an invalid path is an error on every rank
    peers = Peers(what="save_checkpoint")
    if peers.is_joining:  # the ranks that train save the file
        return
    problem: str | None = None
    cause: Exception | None = None
    if peers.is_first:
        try:
            if isinstance(place, str):
                _put(state, place)
            else:
                replace_file(place, lambda file: _write(state, file))
        except Exception as error:
            problem, cause = _explain(place, state, error), error
    peers.agree_with_first(problem, cause)


def _put(state: Mapping[str, Any], address: str) -> None:
    """Write a local file and put it at `address`, where an object appears atomically."""
    parent, _, name = address.rpartition("/")
    remote = RemoteFolder(parent, RETRY_S)  # a missing package is reported before anything is written
    with tempfile.TemporaryDirectory(prefix="phalanx-checkpoint-") as folder:
        file = Path(folder) / "state.pt"
        replace_file(file, lambda stream: _write(state, stream))
        remote.put(file, name)


def _write(state: Mapping[str, Any], file: BinaryIO) -> None:
    torch.save(state, cast(Any, DiskStream(file)))
    file.flush()
    file.seek(0)
    refuse_unreadable(file)


def _explain(path: Path | str, state: Mapping[str, Any], error: Exception) -> str:
    was_there = isinstance(path, str) or os.path.isfile(path)
    kept = "The previous checkpoint is unchanged." if was_there else "Nothing was written."
    advice = ""
    if isinstance(error, UnreadableError):
        fact = f"the state holds objects of {error.names}, which load_checkpoint would refuse to open"
        value, advice = describe_unsafe_value(state)
        fact += value and f": {value}"
        advice = advice or "Save the numbers, strings and tensors in them instead."
    elif isinstance(error, NotDurableError):
        fact = error.strerror or str(error)
        kept, advice = "The new checkpoint is in place, but a power failure may destroy it.", "Check the disk."
    elif (disk := describe_disk_error(error))[0]:
        fact, advice = disk
    else:
        fact = f"{type(error).__name__}: {error}"
        value, advice = describe_unsafe_value(state)
        fact += value and f" ({value})"
        advice = (
            advice
            or "Save only what torch.save can write: tensors, numbers, strings, and dicts, lists and tuples of these."
        )
    return f"save_checkpoint to {path} on rank 0: {fact}. {kept} {advice}"
