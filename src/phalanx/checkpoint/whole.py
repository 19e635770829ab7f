"""Write a checkpoint as one file of torch.save on rank 0, and read it there and hand it on to the others."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from phalanx.checkpoint.blame import publish_name
from phalanx.checkpoint.checksum import ChecksummedStream
from phalanx.checkpoint.manifest import FileRecord
from phalanx.checkpoint.peers import Peers
from phalanx.symmetric_memory import memfd

STATE = "state.pt"
_CHUNK_BYTES = 16 << 20


class UnreadableError(Exception):
    """The state holds classes that could not be loaded again."""


def refuse_unreadable(saved: bytes | BinaryIO) -> None:
    """Return if torch.load would open the file with weights_only. It reads only the file's small index.

    Raises:
        UnreadableError: it would not.
    """
    file = io.BytesIO(saved) if isinstance(saved, bytes) else saved
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(file):
        names = ", ".join(sorted(map(publish_name, unsafe)))
        raise UnreadableError(
            f"the state holds objects of {names}, which could not be loaded again; save the "
            "numbers, strings and tensors in them instead"
        )


def write_whole(folder: Path, state: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Write `state` into `folder`, durably.

    Raises:
        UnreadableError: it could not be loaded again.
        OSError: the disk refused.
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
    """Return what is wrong with the file at `path`, or else the file: rank 0's own, and the other ranks' copy of it.
    All ranks call it.

    Cost: rank 0 reads it once, and broadcasts it in pieces of 16 MiB; where all ranks are on one machine and see that
    very file, the system has it in memory for all of them by then, and nothing is sent.
    """
    own, problem = _open(path, record)
    told = peers.all_gather((problem, _identity(own)))
    problem = told[0][0]
    is_one = all(identity == told[0][1] != () for _, identity in told)
    if problem is None:
        if not (is_one or peers.is_first):
            if own is not None:
                own.close()  # this name leads to another file than the one that rank 0 reads
            own = os.fdopen(memfd.create("phalanx-checkpoint"), "w+b")
        assert own is not None
        problem = _pass(peers, path, record, own, hands_on=not is_one)
        if problem is None:
            own.seek(0)
            return None, own
    if own is not None:
        own.close()
    return problem, None


def _open(path: Path, record: FileRecord) -> tuple[BinaryIO | None, str | None]:
    try:
        file = path.open("rb")
    except OSError as error:
        return None, f"{path} could not be read: {error.strerror or error}"
    size = os.fstat(file.fileno()).st_size
    if size == record.nbytes:
        return file, None
    return file, f"{path} has {size:,} bytes, and {record.nbytes:,} were written"


def _identity(file: BinaryIO | None) -> tuple[object, ...]:
    """Return a value that is equal on ranks of one machine that have opened the same file; nothing if it is not
    known.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ()
    status = os.fstat(file.fileno()) if file is not None else None
    return (boot, status.st_dev, status.st_ino) if status is not None else ()


def _pass(peers: Peers, path: Path, record: FileRecord, file: BinaryIO, *, hands_on: bool) -> str | None:
    """Read the file and pass it on, or receive and write it; return what was wrong with it."""
    chunk = torch.empty(min(_CHUNK_BYTES, max(record.nbytes, 1)), dtype=torch.uint8)
    crc, problem = 0, None
    for at in range(0, record.nbytes if hands_on or peers.is_first else 0, _CHUNK_BYTES):
        piece = chunk[: min(_CHUNK_BYTES, record.nbytes - at)]
        view = memoryview(cast(Any, piece.numpy()))
        if peers.is_first and problem is None:
            try:
                if file.readinto(view) != len(view):  # type: ignore[attr-defined]
                    problem = f"{path} became shorter while it was read"
                crc = zlib.crc32(view, crc)
            except OSError as error:
                problem = f"{path} could not be read: {error.strerror or error}"
        if hands_on:
            peers.broadcast_tensor(piece, src=0)
            if not peers.is_first:
                file.write(view)
    if peers.is_first and problem is None and crc != record.crc32:
        problem = f"{path} does not match its checksum: bits have changed since it was written"
    return peers.broadcast(problem)
