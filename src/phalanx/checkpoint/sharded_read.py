"""Read a checkpoint that many ranks wrote, on any number of ranks.

ranks on one machine          each rank reads what it needs; after the first rank, the data are in the page cache
a tensor needed whole         one rank reads each piece and sends it to the others; the readers take turns: all read
                              their next piece at the same time, then send one after another
a shard on every rank         each rank reads the pieces that overlap with its shard
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from phalanx._base.torch_names import find
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.streams import FileRange

compute_local_shape_and_global_offset: Any = find(
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
    loses="phalanx.checkpoint does not read a sharded checkpoint into DTensors",
)


class PieceReader:
    """`PieceReader` lists and reads the pieces of the tensors of a sharded checkpoint in `folder`."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder = folder
        self._metadata = metadata

    def names(self) -> list[str]:
        kinds = self._metadata.state_dict_metadata
        return [name for name, kind in kinds.items() if isinstance(kind, TensorStorageMetadata)]

    def form(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Return the shape and dtype of the whole tensor."""
        kind = self._metadata.state_dict_metadata[name]
        assert isinstance(kind, TensorStorageMetadata)
        return kind.size, kind.properties.dtype

    def chunks(self, name: str) -> list[ChunkStorageMetadata]:
        """Return the positions of the pieces in the whole tensor."""
        kind = self._metadata.state_dict_metadata[name]
        assert isinstance(kind, TensorStorageMetadata)
        return kind.chunks

    def read(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """Return one piece of a tensor.

        Raises:
            OSError: the file cannot be read.
            Exception: whatever torch.load raises.
        """
        where = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        path = self._folder / where.relative_path
        if path.parent != self._folder:
            raise pickle.UnpicklingError(f"it names {where.relative_path}, which is outside the checkpoint")
        with path.open("rb") as file:
            part = cast(Any, FileRange(file, where.offset, where.length))
            piece: Tensor = torch.load(part, map_location="cpu", weights_only=True)
        return piece


def read_tensors(
    peers: Peers,
    pieces: PieceReader,
    names: Sequence[str],
    shards: Mapping[str, DTensor],
    readers: Sequence[int],
    *,
    on_one_machine: bool,
) -> tuple[dict[str, Tensor], str | None]:
    """Return the named tensors, whole or read into `shards`, and this rank's first problem. All ranks call this.

    `shards` are DTensors to fill, of which this rank has its local part. `readers` are the ranks that see the folder.
    With `on_one_machine` all ranks see it, on one machine with one page cache.
    """
    alone = set(names) if on_one_machine else set(shards) if peers.rank in readers else set()
    by_all = set.intersection(*peers.all_gather(alone))
    to_broadcast = [(name, chunk) for name in names if name not in by_all for chunk in pieces.chunks(name)]
    found: dict[str, Tensor] = {}
    problem: str | None = None
    turn = 0
    own: Tensor | None = None
    my_turn = readers.index(peers.rank) if peers.rank in readers else len(to_broadcast)

    def read(name: str, chunk: ChunkStorageMetadata) -> Tensor | None:
        nonlocal problem
        if problem is not None:
            return None
        try:
            piece = pieces.read(name, chunk)
            if piece.shape != chunk.sizes or piece.dtype != pieces.form(name)[1]:
                raise ValueError(f"{name} is a {piece.dtype} {tuple(piece.shape)}")
            return piece.contiguous()
        except Exception as error:
            problem = f"{name}: {type(error).__name__}: {error}"
            return None

    for name in names:
        shape, dtype = pieces.form(name)
        chunks = pieces.chunks(name)
        is_piece = name not in shards and len(chunks) == 1 and chunks[0].sizes == shape  # nothing to fill
        target = shards[name] if name in shards else torch.empty(() if is_piece else shape, dtype=dtype, device="cpu")
        found[name] = target
        where, local = _place(target)
        for chunk in chunks:
            piece: Tensor | None = None
            if name in by_all:
                piece = read(name, chunk) if is_piece or _overlap(chunk, where) is not None else None
            else:
                if turn % len(readers) == 0 and turn + my_turn < len(
                    to_broadcast
                ):  # all readers now read their next piece
                    own = read(*to_broadcast[turn + my_turn])
                reader = readers[turn % len(readers)]
                if peers.rank == reader:
                    piece, own = own, None
                piece = torch.empty(chunk.sizes, dtype=dtype, device="cpu") if piece is None else piece
                peers.broadcast_tensor(piece, src=reader)
                turn += 1
            if is_piece and piece is not None:
                found[name] = piece
            elif piece is not None:
                _fill(local, where, chunk, piece)
    return found, problem


def _place(tensor: Tensor) -> tuple[ChunkStorageMetadata, Tensor]:
    """Return the position of this rank's part in the whole tensor, and the part."""
    if isinstance(tensor, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), tensor.to_local()
    return ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape), tensor


def _overlap(a: ChunkStorageMetadata, b: ChunkStorageMetadata) -> list[tuple[int, int]] | None:
    """Return the overlap of two boxes as (from, to) by dimension; None if they do not overlap."""
    found = [(max(x, y), min(x + m, y + n)) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)]
    return found if all(start < stop for start, stop in found) else None


def _fill(local: Tensor, where: ChunkStorageMetadata, chunk: ChunkStorageMetadata, piece: Tensor) -> None:
    span = _overlap(where, chunk)
    if span is None or math.prod(chunk.sizes) == 0:
        return
    to = tuple(slice(start - at, stop - at) for (start, stop), at in zip(span, where.offsets, strict=True))
    of = tuple(slice(start - at, stop - at) for (start, stop), at in zip(span, chunk.offsets, strict=True))
    with torch.no_grad():
        local[to].copy_(piece[of])
