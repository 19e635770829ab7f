"""Write a checkpoint in parts, one by each rank, in the file format of torch.distributed.checkpoint.

    plan       all ranks    assign the pieces of each tensor to ranks: each rank writes its own shards, and about the
                            same number of bytes of replicated tensors; kept for the next save of the same shapes
    snapshot   each rank    copy its own pieces
    write      each rank    `__<rank>_0.distcp`, then `.part-<rank>`: the list of its pieces, as a sign of completion
    commit     rank 0       when every part is there: `.metadata`, structure.pt, the manifest, the name

After the plan the ranks communicate only through the folder (or address), which all ranks must see.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from phalanx._base.torch_names import find
from phalanx.checkpoint.manifest import FileRecord
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.slices import SlicedTensor
from phalanx.checkpoint.snapshot import SnapshotMemory, copy_contiguous
from phalanx.checkpoint.streams import ChecksummedStream
from phalanx.checkpoint.structure import STRUCTURE
from phalanx.checkpoint.tree import Tree, is_tensor
from phalanx.errors import CheckpointError, InternalError

_StorageInfo: Any = find(
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    loses="phalanx.checkpoint does not write sharded checkpoints",
)


@dataclass(frozen=True)
class Plan:
    """`Plan` lists the pieces that this rank writes; `metadata`, only on rank 0, lists all pieces.

    `is_uniform`: the states of all ranks have the same names.
    """

    signature: tuple[Any, ...]
    mine: SavePlan
    metadata: Metadata | None
    is_uniform: bool


def plan_save(tree: Tree, pinned: Collection[str], peers: Peers, before: Plan | None) -> Plan:
    """Divide the work of saving `tree`; `pinned` are the names of values that rank 0 saves. All ranks call this."""
    signature = (peers.rank, peers.world_size, *_signature(tree))
    if all(peers.all_gather(before is not None and before.signature == signature)):
        assert before is not None
        return before
    gathered = peers.gather((_local_plan(tree), frozenset(pinned), tuple(tree.leaves)))
    answer: tuple[list[SavePlan], bool] | str = ""
    metadata = None
    if peers.is_first:
        try:
            plans, metadata = _global_plan(
                [plan for plan, _, _ in gathered], set().union(*(names for _, names, _ in gathered))
            )
            answer = (plans, all(names == gathered[0][2] for _, _, names in gathered))
        except Exception as error:  # pieces overlap, or do not cover the whole
            answer = f"{peers.what}: the ranks' parts of the state do not fit together: {error}. Nothing was saved."
    answer = peers.broadcast(answer)
    if isinstance(answer, str):
        raise CheckpointError(answer)
    return Plan(signature, answer[0][peers.rank], metadata, answer[1])


def _signature(tree: Tree) -> tuple[Any, ...]:
    """Return everything that the plan depends on."""
    return (*(_form(name, leaf) for name, leaf in tree.leaves.items()), tuple(tree.aliases.items()))


def _form(name: str, leaf: Any) -> tuple[Any, ...]:
    if not is_tensor(leaf):
        return (name,)
    where: Any = None
    if isinstance(leaf, DTensor):
        where = (leaf.placements, leaf.device_mesh.mesh.tolist())
    elif isinstance(leaf, SlicedTensor):
        where = tuple(leaf.boxes())
    return (name, leaf.dtype, tuple(leaf.shape), where)


def _local_plan(tree: Tree) -> SavePlan:
    plain: dict[str, Any] = {}
    others: list[WriteItem] = []
    for name, leaf in tree.leaves.items():
        if isinstance(leaf, SlicedTensor):
            others += _slice_items(name, leaf)
        elif isinstance(leaf, torch.Tensor) and not is_tensor(
            leaf
        ):  # torch's planner would access the tensor's storage
            others.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        elif name not in tree.aliases:
            plain[name] = leaf
    plan = create_default_local_save_plan(plain, is_coordinator=False)
    return dataclasses.replace(plan, items=[*plan.items, *others], planner_data=tree.paths)


def _slice_items(name: str, leaf: SlicedTensor) -> Iterator[WriteItem]:
    for offsets, sizes in leaf.boxes():
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=leaf.dtype), size=leaf.shape)
        yield WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _global_plan(plans: Sequence[SavePlan], pinned: Collection[str]) -> tuple[list[SavePlan], Metadata]:
    """Assign pinned tensors and objects to the first rank that has them, and other pieces to the least loaded rank."""
    assigned: set[MetadataIndex] = set()
    chosen = []
    for plan in plans:
        items = []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO or item.index.fqn in pinned:
                if item.index in assigned:
                    continue
                assigned.add(item.index)
            items.append(item)
        chosen.append(dataclasses.replace(plan, items=items))
    planned, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(chosen)
    paths = dict(ChainMap(*(plan.planner_data for plan in plans)))
    writer = FileSystemWriter(os.devnull)
    prefixed = writer.prepare_global_plan([dataclasses.replace(plan, planner_data=None) for plan in planned])
    return prefixed, dataclasses.replace(metadata, planner_data=paths)


# -- the data ----------------------------------------------------------------------------------------------------------


@dataclass
class SavedPieces:
    """`SavedPieces` has the data that a rank writes, by piece: the state's own tensors, or copies of them."""

    tensors: dict[MetadataIndex, torch.Tensor] = field(default_factory=dict)
    objects: dict[MetadataIndex, bytes] = field(default_factory=dict)


def collect_pieces(plan: Plan, tree: Tree, memory: SnapshotMemory | None) -> SavedPieces:
    """Return the pieces that this rank writes, copied into `memory`; without `memory` the state's own tensors."""
    pieces = SavedPieces()
    for item in plan.mine.items:
        leaf = tree.leaves[item.index.fqn]
        if item.type == WriteItemType.BYTE_IO:
            pieces.objects[item.index] = encode(leaf)
        elif isinstance(leaf, SlicedTensor):
            assert item.index.offset is not None
            pieces.tensors[item.index] = leaf.piece(item.index.offset)
        else:
            pieces.tensors[item.index] = find_tensor_shard(leaf, item.index).detach()
    if memory is not None:
        copies = copy_contiguous(pieces.tensors.values(), memory)
        pieces.tensors = dict(zip(pieces.tensors, copies, strict=True))
    return pieces


def encode(value: object) -> bytes:
    """Return an object as bytes in torch.save's format."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class _Planner(DefaultSavePlanner):
    """`_Planner` gives torch's writer the pieces collected earlier, even if the state has changed since."""

    def __init__(self, pieces: SavedPieces) -> None:
        super().__init__()
        self._pieces = pieces

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._pieces.objects[write_item.index])
        return self._pieces.tensors[write_item.index]


# -- files -------------------------------------------------------------------------------------------------------------


class RecordingFileSystem(FileSystem):
    """`RecordingFileSystem` writes the files of torch's writer, with fsync, and records their lengths and checksums."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Any:
        """Yield a stream whose length and checksum are recorded at the end."""
        with open(path, mode.replace("+", "") + "+") as file:  # readable, to read a record without a checksum again
            stream = ChecksummedStream(cast(Any, file))
            yield stream
            file.flush()
            os.fsync(file.fileno())
            self.records[Path(path).name] = FileRecord(stream.nbytes, stream.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


@dataclass(frozen=True)
class RankShard:
    """`RankShard` lists the files that one rank has written, and the positions of the pieces in them."""

    files: Mapping[str, FileRecord]
    pieces: Sequence[tuple[str, Sequence[int] | None, int | None, str, int, int]] = ()

    def encode(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: str) -> RankShard:
        content = json.loads(text)
        files = {name: FileRecord(**record) for name, record in content["files"].items()}
        return cls(files, [tuple(piece) for piece in content["pieces"]])


def write_part(folder: Path, plan: Plan, pieces: SavedPieces) -> RankShard:
    """Write this rank's pieces into `folder`, durably.

    Raises:
        OSError: the disk failed.
    """
    if not plan.mine.items:
        return RankShard({})
    writer, files = _writer(folder)
    results = writer.write_data(plan.mine, _Planner(pieces)).wait()
    return RankShard(
        files.records,
        [
            (
                result.index.fqn,
                None if result.index.offset is None else list(result.index.offset),
                result.index.index,
                result.storage_data.relative_path,
                result.storage_data.offset,
                result.storage_data.length,
            )
            for result in results
        ],
    )


def part_name(rank: int) -> str:
    """Return the name of the file that lists a rank's pieces."""
    return f".part-{rank}"


def write_metadata(
    folder: Path, plan: Plan, parts: Sequence[RankShard], aliases: Mapping[str, str], structure: bytes
) -> dict[str, FileRecord]:
    """Write the positions of all pieces (torch's `.metadata`) and the structure; return the records of all files."""
    assert plan.metadata is not None
    metadata = dataclasses.replace(plan.metadata, state_dict_metadata=dict(plan.metadata.state_dict_metadata))
    results = [
        WriteResult(MetadataIndex(name, offset, index), length, _StorageInfo(path, at, length))
        for part in parts
        for name, offset, index, path, at, length in part.pieces
    ]
    there = {result.index for result in results}
    for name, kind in metadata.state_dict_metadata.items():
        offsets = [chunk.offsets for chunk in kind.chunks] if isinstance(kind, TensorStorageMetadata) else [None]
        if any(MetadataIndex(name, at) not in there for at in offsets):
            raise InternalError(f"no rank has written {name!r}. Please report it.")
    by_name = {result.index.fqn: result for result in results}
    for alias, name in aliases.items():
        if alias not in metadata.state_dict_metadata and name in by_name:
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            results.append(
                dataclasses.replace(by_name[name], index=dataclasses.replace(by_name[name].index, fqn=alias))
            )
    writer, files = _writer(folder)
    with files.create_stream(folder / STRUCTURE, "xb") as stream:
        stream.write(structure)
    writer.finish(metadata, [results])
    for part in parts:
        files.records.update(part.files)
    return files.records


def _writer(folder: Path) -> tuple[FileSystemWriter, RecordingFileSystem]:
    # the recording file system calls fsync itself
    writer, files = FileSystemWriter(folder, sync_files=False), RecordingFileSystem()
    writer.fs = files
    return writer, files
