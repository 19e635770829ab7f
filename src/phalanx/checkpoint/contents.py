"""`inspect` lists the contents of a checkpoint without loading its tensors."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx._base.storage import place_of
from phalanx.checkpoint.checksum import find_damage
from phalanx.checkpoint.history import History
from phalanx.checkpoint.load import find_wrong_form
from phalanx.checkpoint.manifest import find_damaged_file, is_checkpoint, read_manifest
from phalanx.checkpoint.remote_history import RETRY_S, download
from phalanx.checkpoint.structure import METADATA, STRUCTURE, decode_structure
from phalanx.checkpoint.tree import Node, Tree
from phalanx.checkpoint.whole import STATE
from phalanx.errors import CheckpointError

_VALUE_CHARACTERS = 60
_JAGGED = {"torch.nested", "torch._dynamo"}  # torch.load creates a jagged tensor only if these are imported


@dataclass(frozen=True)
class Item:
    """`Item` is a leaf of the state: a tensor, or a value as text.

    `shape` has -1 for dimensions in which the parts of a nested tensor differ. `pieces` is the number of pieces in
    which the tensor was written.
    """

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    pieces: int = 1
    value: str = ""


@dataclass(frozen=True)
class CheckpointContents:
    """`CheckpointContents` is the result of `inspect`.

    `others` are the older checkpoints in the folder, if a folder of checkpoints was inspected.
    """

    path: str
    form: str
    nbytes: int
    step: int | None = None
    world_size: int | None = None
    created: str = ""
    torch: str = ""
    items: tuple[Item, ...] = ()
    damage: tuple[str, ...] = ()
    others: tuple[str, ...] = field(default=())
    metrics: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect(path: str | os.PathLike[str], *, verify: bool = False) -> CheckpointContents:
    """List the contents of `path`: a file of torch.save, a checkpoint of a CheckpointManager or the folder of its
    checkpoints, or a folder of torch.distributed.checkpoint.

    Arguments:
        path: a path, or an fsspec address, which is downloaded first.
        verify: also verify checksums, which reads everything.

    Raises:
        CheckpointError: there is no checkpoint at `path`, or it cannot be read.
    """
    place = place_of(path)
    if isinstance(place, Path):
        return _inspect_path(place, verify)
    try:
        with download(place, RETRY_S) as (here, shown, others):
            found = _inspect_path(here, verify)
            damage = tuple(text.replace(str(here), shown) for text in found.damage)
            return replace(found, path=shown, others=others, damage=damage)
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith("inspect") else f"inspect: {text}") from error


def _inspect_path(path: Path, verify: bool) -> CheckpointContents:
    others: tuple[str, ...] = ()
    if path.is_dir() and not is_checkpoint(path) and not (path / METADATA).exists():
        entries = History(path, None).entries()
        if not entries:
            raise CheckpointError(f"inspect: there is no checkpoint in {path}.")
        path, others = entries[0].path, tuple(entry.path.name for entry in entries[1:])
    try:
        if path.is_file():
            return _of_file(path, verify)
        return _of_folder(path, verify, others) if is_checkpoint(path) else _of_torch(path)
    except CheckpointError as error:
        raise CheckpointError(f"inspect: {error}") from error
    except OSError as error:
        place = (path.is_dir() and error.filename) or path
        raise CheckpointError(f"inspect: {place} could not be read: {error.strerror or error}.") from error
    except Exception as error:  # readers of a damaged or foreign file may raise anything
        reason = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"inspect: {path} cannot be opened: {type(error).__name__}: {reason}.") from error


def _of_file(path: Path, verify: bool) -> CheckpointContents:
    items, damage = tuple(_of_state(path)), ""
    if verify:
        with path.open("rb") as file:
            damage = find_damage(file)
    found = (f"{path} is damaged: {damage}",) if damage else ()
    return CheckpointContents(str(path), "torch.save", path.stat().st_size, items=items, damage=found)


def _of_state(path: Path) -> Iterator[Item]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user of `inspect` cannot change the contents that torch warns about
        try:
            state = _load_forms(path)
        except Exception as error:
            with path.open("rb") as file:
                problem = find_wrong_form(path, file)
            if problem:
                raise CheckpointError(problem) from error
            raise
    for name, leaf in Tree.of(state if isinstance(state, dict) else {"": state}).leaves.items():
        if isinstance(leaf, Tensor):
            yield Item(name, _dtype(leaf.dtype), _find_shape(leaf), _count_bytes(leaf))
        else:
            yield _of_value(name, leaf)


def _load_forms(path: Path) -> Any:
    """Return the state without reading the values of its tensors."""
    try:
        try:
            return torch.load(path, map_location="meta", weights_only=True)
        except NotImplementedError:  # quantized and nested tensors cannot be created on "meta"
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        if "torch.nested" not in str(error) or sys.modules.keys() >= _JAGGED:
            raise
        for module in _JAGGED:
            importlib.import_module(module)
        return _load_forms(path)


def _find_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's shape, with -1 for a dimension in which the parts of a nested tensor differ."""
    if tensor.is_nested and tensor.layout is torch.strided:
        sizes = [set(column) for column in zip(*(part.shape for part in tensor.unbind()), strict=True)]
        return (tensor.size(0), *(size.pop() if len(size) == 1 else -1 for size in sizes))
    return tuple(size if isinstance(size, int) else -1 for size in tensor.shape)


def _count_bytes(tensor: Tensor) -> int:
    """Return the size of the tensor's values in bytes, and for a sparse tensor of its indices, too."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.values().nbytes + tensor.crow_indices().nbytes + tensor.col_indices().nbytes
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.values().nbytes + tensor.ccol_indices().nbytes + tensor.row_indices().nbytes
    return tensor.numel() * tensor.element_size()


def _of_folder(path: Path, verify: bool, others: tuple[str, ...]) -> CheckpointContents:
    manifest = read_manifest(path)
    damage: tuple[str, ...] = ()
    if verify:
        checked = (find_damaged_file(path, name, record) for name, record in sorted(manifest.files.items()))
        damage = tuple(filter(None, checked))
    items: tuple[Item, ...] = ()
    if not damage:
        if manifest.kind == "whole":
            items = tuple(_of_state(path / STATE))
        else:
            pieces = _pieces(path)
            structure, aliases = decode_structure((path / STRUCTURE).read_bytes())
            items = tuple(_of_node(structure, (), pieces, aliases))
    return CheckpointContents(
        str(path),
        manifest.kind,
        manifest.nbytes,
        manifest.step,
        manifest.world_size,
        manifest.created,
        manifest.torch,
        items,
        damage,
        others,
        dict(manifest.metrics),
    )


def _of_torch(path: Path) -> CheckpointContents:
    pieces = _pieces(path)
    nbytes = sum(file.stat().st_size for file in path.iterdir())
    return CheckpointContents(str(path), "torch.distributed.checkpoint", nbytes, items=tuple(pieces.values()))


def _pieces(path: Path) -> dict[str, Item]:
    """Return the leaves that torch's `.metadata` lists, by name."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from phalanx.checkpoint.sharded_metadata import decode_metadata

    found = {}
    for name, kind in decode_metadata((path / METADATA).read_bytes()).state_dict_metadata.items():
        if isinstance(kind, TensorStorageMetadata):
            dtype, shape = kind.properties.dtype, tuple(kind.size)
            found[name] = Item(name, _dtype(dtype), shape, kind.size.numel() * dtype.itemsize, len(kind.chunks))
        else:
            found[name] = Item(name, value="(an object)")
    return found


def _of_node(node: Node, path: tuple[Any, ...], pieces: dict[str, Item], aliases: Any) -> Iterator[Item]:
    if node[0] == "tensor":
        item = pieces[node[1]]
        yield Item(item.name, item.dtype, item.shape, 0 if item.name in aliases else item.nbytes, item.pieces)
    elif node[0] == "value":
        yield _of_value(".".join(map(str, path)), node[1])
    else:
        inner = node[1] if node[0] in ("dict", "OrderedDict") else enumerate(node[1])
        for key, item in inner:
            yield from _of_node(item, (*path, key), pieces, aliases)


def _of_value(name: str, value: object) -> Item:
    text = repr(value)
    return Item(name, value=text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 1]}…")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
