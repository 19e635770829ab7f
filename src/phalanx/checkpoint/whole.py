"""A checkpoint in one file of torch.save: written by rank 0, read by rank 0, and handed on to the others."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from phalanx.checkpoint.checksum import ChecksummedStream
from phalanx.checkpoint.manifest import FileRecord
from phalanx.checkpoint.peers import Peers
from phalanx.symmetric_memory import memfd

STATE = "state.pt"
_CHUNK_BYTES = 16 << 20


class UnreadableError(Exception):
    """The state holds classes that could not be loaded again."""


def refuse_unreadable(saved: bytes | BinaryIO) -> None:
    """Return if torch.load would open it with weights_only. Reads its small index only.

    Raises:
        UnreadableError: it would not.
    """
    file = io.BytesIO(saved) if isinstance(saved, bytes) else saved
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(file):
        raise UnreadableError(
            f"the state holds objects of {', '.join(sorted(unsafe))}, which could not be loaded again; save the "
            "numbers, strings and tensors in them instead"
        )


def write_whole(folder: Path, state: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Write `state` into `folder`, durably.

    Raises:
        UnreadableError: it could not be loaded again.
        OSError: the disk would not have it.
    """
    with (folder / STATE).open("x+b") as file:
        stream = ChecksummedStream(cast(BinaryIO, file))
        torch.save(state, cast(Any, stream))
        file.flush()
        file.seek(0)
        refuse_unreadable(cast(BinaryIO, file))
        os.fsync(file.fileno())
    return {STATE: FileRecord(stream.nbytes, stream.crc32)}


def hand_on(peers: Peers, path: Path, record: FileRecord) -> tuple[str | None, BinaryIO | None]:
    """What is wrong with the file at `path`, or else the file: rank 0's own, and the others' copy of it. Collective.

    Cost: rank 0 reads it once, and broadcasts it in pieces of 16 MiB.
    """
    problem: str | None = None
    own: BinaryIO | None = None
    if peers.is_first:
        try:
            own = path.open("rb")
            size = os.fstat(own.fileno()).st_size
            if size != record.nbytes:
                problem = f"{path} has {size:,} bytes, and {record.nbytes:,} were written"
        except OSError as error:
            problem = f"{path} could not be read: {error.strerror or error}"
    problem = peers.broadcast(problem)
    if problem is None:
        copy = None if peers.is_first else os.fdopen(memfd.create("phalanx-checkpoint"), "w+b")
        problem = _pass(peers, path, record, own or copy)
        if problem is None:
            file = own or copy
            assert file is not None
            file.seek(0)
            return None, file
        if copy is not None:
            copy.close()
    if own is not None:
        own.close()
    return problem, None


def _pass(peers: Peers, path: Path, record: FileRecord, file: BinaryIO | None) -> str | None:
    """Read it and pass it on, or take it and write it; what was wrong with it."""
    assert file is not None
    chunk = torch.empty(min(_CHUNK_BYTES, max(record.nbytes, 1)), dtype=torch.uint8)
    crc, problem = 0, None
    for at in range(0, record.nbytes, _CHUNK_BYTES):
        piece = chunk[: min(_CHUNK_BYTES, record.nbytes - at)]
        view = memoryview(cast(Any, piece.numpy()))
        if peers.is_first and problem is None:
            try:
                if file.readinto(view) != len(view):  # type: ignore[attr-defined]
                    problem = f"{path} became shorter while it was read"
                crc = zlib.crc32(view, crc)
            except OSError as error:
                problem = f"{path} could not be read: {error.strerror or error}"
        peers.broadcast_tensor(piece, src=0)
        if not peers.is_first:
            file.write(view)
    if problem is None and crc != record.crc32:
        problem = f"{path} does not match its checksum: bits have changed since it was written"
    return peers.broadcast(problem)
