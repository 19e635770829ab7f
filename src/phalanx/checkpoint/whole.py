"""Write a checkpoint as one file of torch.save on rank 0, and share the file with all ranks to read it."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from phalanx._comm.symmetric_memory import memfd
from phalanx.checkpoint.blame import publish_name
from phalanx.checkpoint.checksum import Crc32, crc32_of_range
from phalanx.checkpoint.manifest import FileRecord
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.streams import ChecksummedStream

STATE = "state.pt"
_CHUNK_BYTES = 16 << 20


class UnreadableError(Exception):
    """The state has objects of classes that could not be loaded again; `names` lists the classes."""

    def __init__(self, names: str) -> None:
        super().__init__(
            f"the state holds objects of {names}, which could not be loaded again; save the "
            "numbers, strings and tensors in them instead"
        )
        self.names = names


def refuse_unreadable(saved: bytes | BinaryIO) -> None:
    """Check that torch.load can open the file with weights_only. Reads no tensors.

    Raises:
        UnreadableError: torch.load would refuse it.
    """
    file = io.BytesIO(saved) if isinstance(saved, bytes) else saved
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(file):
        raise UnreadableError(", ".join(sorted(map(publish_name, unsafe))))


def write_whole(folder: Path, state: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Write `state` into `folder`, durably.

    Raises:
        UnreadableError: the state could not be loaded again.
        OSError: the disk failed.
    """
    with (folder / STATE).open("x+b") as file:
        stream = ChecksummedStream(cast(BinaryIO, file))
        torch.save(state, cast(Any, stream))
        file.flush()
        file.seek(0)
        refuse_unreadable(cast(BinaryIO, file))
        os.fsync(file.fileno())
    return {STATE: FileRecord(stream.nbytes, stream.crc32)}


def share_file(peers: Peers, path: Path, record: FileRecord) -> tuple[str | None, BinaryIO | None]:
    """Verify the checkpoint file at `path`, and open it on every rank. All ranks call this.

    Return the problem and None, or None and the file. If some rank does not see the file, all ranks except rank 0 get
    a copy in memory.

    Cost: if all ranks are on one machine and see the same file, each verifies the checksum of a share, and no contents
    are sent; the file is in the page cache afterwards. Otherwise rank 0 reads the file once, and broadcasts it in
    pieces of 16 MiB.
    """
    own, problem = _open(path, record)
    is_same, problem = peers.is_same_file(own), peers.broadcast(problem)
    if problem is None:
        if not (is_same or peers.is_first):
            if own is not None:
                own.close()  # this rank sees another file than rank 0
            own = os.fdopen(memfd.create("phalanx-checkpoint"), "w+b")
        assert own is not None
        problem = (_compare_together if is_same else _broadcast_file)(peers, path, record, own)
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
    return file, f"{path} has {size:,} bytes, but {record.nbytes:,} were written"


def _compare_together(peers: Peers, path: Path, record: FileRecord, file: BinaryIO) -> str | None:
    """Verify a file that all ranks see, each rank a share of it; return its problem, or None."""
    bounds = [record.nbytes * rank // peers.world_size for rank in range(peers.world_size + 1)]
    begin, nbytes = bounds[peers.rank], bounds[peers.rank + 1] - bounds[peers.rank]
    crc, problem = 0, None
    try:
        crc = crc32_of_range(file, begin, nbytes)
    except OSError as error:
        problem = f"{path} could not be read: {error.strerror or error}"
    gathered = peers.all_gather((problem, crc, nbytes))
    if problem := next((problem for problem, _, _ in gathered if problem), None):
        return problem
    whole = Crc32()
    for _, share, length in gathered:
        whole.extend(share, length)
    return None if whole.value == record.crc32 else _describe_changed(path)


def _describe_changed(path: Path) -> str:
    return f"{path} does not match its checksum: bits have changed since it was written"


def _broadcast_file(peers: Peers, path: Path, record: FileRecord, file: BinaryIO) -> str | None:
    """Read the file and broadcast it, or receive and write it; return its problem, or None."""
    chunk = torch.empty(min(_CHUNK_BYTES, max(record.nbytes, 1)), dtype=torch.uint8, device="cpu")
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
    if peers.is_first and problem is None and crc != record.crc32:
        problem = _describe_changed(path)
    return peers.broadcast(problem)
