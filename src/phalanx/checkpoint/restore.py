"""Load one of several checkpoints: all ranks verify and read the whole checkpoint before they change any part."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from phalanx._comm.transport.memory_order import lay_out
from phalanx._comm.transport.tensors import is_dense
from phalanx.checkpoint.history import History, explain_renamed
from phalanx.checkpoint.manifest import Manifest, find_damaged_file, is_checkpoint, read_manifest
from phalanx.checkpoint.optimizer_fit import OptimizerNotes, describe_missing_state
from phalanx.checkpoint.parts import HALF_LOADED, MismatchReport, describe_misfits, fit_stages, load_part, module_state
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.remote_history import DownloadError, RemoteHistory
from phalanx.checkpoint.structure import METADATA, STRUCTURE, decode_structure
from phalanx.checkpoint.tree import Node, build, find, is_dtensor, strides_of_tensors, tensor_names
from phalanx.checkpoint.whole import STATE, share_file
from phalanx.errors import CheckpointError

if TYPE_CHECKING:  # torch.distributed.checkpoint takes most of a second to import, so import it only when needed
    from torch.distributed.tensor import DTensor

    from phalanx.checkpoint.sharded_read import PieceReader


@dataclass
class RestoredCheckpoint:
    """A `RestoredCheckpoint` is a loaded checkpoint: its step, path, state by name, and mismatches (strict=False)."""

    step: int
    path: Path | str
    state: dict[str, Any]
    report: MismatchReport = field(default_factory=MismatchReport)


class DamagedError(CheckpointError):
    """A file of a checkpoint differs from its checksum or length."""


class VanishedError(CheckpointError):
    """A checkpoint was removed while it was read, because its writer has newer ones."""


def restore(
    peers: Peers,
    history: History | RemoteHistory,
    names: Sequence[str],
    parts: Mapping[str, Any] | None,
    *,
    map_location: str | torch.device,
    strict: bool,
    fallback: bool,
) -> RestoredCheckpoint | None:
    """Load the first of the checkpoints `names`, or with `fallback` the first undamaged one; None if there are none."""
    require_device(map_location, peers.what)
    parts = {} if parts is None else parts
    if not isinstance(parts, Mapping):
        raise TypeError(
            f"{peers.what}: parts must be a dict of the objects to load, by name, got a {type(parts).__name__}"
        )
    stateful = {name: part for name, part in parts.items() if hasattr(part, "load_state_dict")}
    for number, name in enumerate(names):
        path = history.shown(name)
        try:
            with history.opened(peers, name) as folder:
                manifest, state = _read_shown(peers, folder, path, stateful)
        except (DamagedError, DownloadError) as error:
            if peers.broadcast(not history.exists(name) if peers.is_first else False):
                raise VanishedError(f"{peers.what}: {path} was removed while it was read.") from None
            left = names[number + 1 :]
            if not fallback or not left:
                hint = f" fallback=True loads the previous one, {left[0]}." if left else " There is no previous one."
                raise DamagedError(f"{error}{hint}") from None
            warnings.warn(f"{error} Loading the previous one, {left[0]}.", stacklevel=3)
            continue
        return _load(peers, path, manifest, state, stateful, list(parts), map_location, strict)
    return None


def _read_shown(
    peers: Peers, folder: Path, path: Path | str, stateful: Mapping[str, Any]
) -> tuple[Manifest, dict[str, Any]]:
    """Return the result of `read_state`; errors name the path of the checkpoint, not that of a local copy."""
    try:
        return read_state(peers, folder, stateful)
    except CheckpointError as error:
        if folder != path:
            error.args = (str(error).replace(str(folder), str(path)), *error.args[1:])
        raise


def _load(
    peers: Peers,
    path: Path | str,
    manifest: Manifest,
    state: dict[str, Any],
    stateful: Mapping[str, Any],
    wanted: Sequence[str],
    map_location: str | torch.device,
    strict: bool,
) -> RestoredCheckpoint:
    stages = fit_stages(stateful, state)
    report = describe_misfits(stateful, state, stages, OptimizerNotes(manifest.orders, manifest.classes))
    report.missing += [name for name in wanted if name not in state and name not in stateful]
    mismatches = "" if not report else f"{peers.what} on rank {peers.rank}: {path} does not fit:\n{report}\n"
    advice = "Nothing was loaded. Build the parts as they were saved, or load what fits with strict=False."
    peers.agree(mismatches + advice if mismatches and strict else None)
    problem, cause, gaps = None, None, list[str]()
    try:
        own = {**state, **{name: fitting for name, (fitting, _) in stages.items()}}
        gaps = _load_parts(own, stateful, report, strict=strict)
    except Exception as error:  # raised by a part on this rank only
        fact = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        problem = f"{peers.what} on rank {peers.rank}: {path}: {fact.rstrip('.')}.\n{HALF_LOADED}"
        cause = error
    peers.agree(problem, cause)
    for gap in gaps:
        warnings.warn(f"{peers.what}: {path}: {gap}", stacklevel=4)
    return RestoredCheckpoint(manifest.step, path, _moved(state, map_location), report)


def _load_parts(state: dict[str, Any], parts: Mapping[str, Any], report: MismatchReport, *, strict: bool) -> list[str]:
    """Load each part; return descriptions of parameters for which an optimizer has no state."""
    gaps = []
    for name, part in parts.items():
        is_optimizer = isinstance(part, torch.optim.Optimizer)
        fits = not any(text.startswith((f"{name}:", f"{name}.state.")) for text in report.misshapen)
        if name in state and (strict or fits or not is_optimizer):
            load_part(part, state[name], strict=strict)
            if is_optimizer and (gap := describe_missing_state(part, state[name])):
                gaps.append(f"{name!r} {gap}")
    return gaps


def require_device(map_location: object, what: str) -> None:
    """Refuse a device that this process does not have; accept torch.load's other kinds of map_location."""
    if not isinstance(map_location, (str, torch.device)):
        return
    try:
        torch.empty(0, device=map_location)
    except Exception as error:  # RuntimeError, AssertionError, AcceleratorError: devices raise different errors
        first_line = (str(error).splitlines() or [type(error).__name__])[0].strip().rstrip(".")
        raise ValueError(
            f"{what}: map_location={str(map_location)!r} cannot be used in this process: "
            f"{first_line.partition('. ')[0]}. Load to the CPU (map_location='cpu', the default), or to a "
            "device of this process."
        ) from error


def find_latest(path: Path) -> Path | None:
    """Return the checkpoint at `path`, or the latest one in that folder; None if there is none."""
    if is_checkpoint(path):
        return path
    return next((entry.path for entry in History(path, None).entries()), None)


def read_moved(peers: Peers, path: Path, map_location: str | torch.device) -> tuple[dict[str, Any], OptimizerNotes]:
    """Return the whole state at `path`, on `map_location`, and the notes on its optimizers. All ranks call this.

    Raises:
        DamagedError: a file is damaged.
    """
    manifest, state = read_state(peers, path, {})
    return _moved(state, map_location), OptimizerNotes(manifest.orders, manifest.classes)


def read_state(peers: Peers, path: Path, parts: Mapping[str, Any]) -> tuple[Manifest, dict[str, Any]]:
    """Return a checkpoint's manifest and its state: on the CPU, or sharded like `parts`. All ranks call this.

    Raises:
        DamagedError: a file is damaged; on every rank.
    """
    problem: str | None = None
    manifest: Manifest | None = None
    if peers.is_first:
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            problem = str(error)
        else:
            problem = explain_renamed(path, manifest)
    problem, manifest = peers.broadcast((problem, manifest))
    if problem is not None or manifest is None:
        raise DamagedError(f"{peers.what}: {problem}")
    if manifest.kind == "whole":
        return manifest, _read_whole(peers, path, manifest)
    return manifest, _read_sharded(peers, path, manifest, parts)


def _read_whole(peers: Peers, path: Path, manifest: Manifest) -> dict[str, Any]:
    problem, file = share_file(peers, path / STATE, manifest.files[STATE])
    if problem is not None:
        raise DamagedError(f"{peers.what}: {problem}.")
    assert file is not None
    with file:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state


def _read_sharded(peers: Peers, path: Path, manifest: Manifest, parts: Mapping[str, Any]) -> dict[str, Any]:
    from phalanx.checkpoint.sharded_metadata import decode_metadata
    from phalanx.checkpoint.sharded_read import PieceReader, read_tensors

    readers = [rank for rank, sees in enumerate(peers.all_gather(os.path.isdir(path))) if sees]
    problem: str | None = None
    head: tuple[bytes, bytes] | None = None
    files = sorted(manifest.files)
    if peers.rank in readers:  # each of these ranks verifies the checksums of a share of the files
        mine = readers.index(peers.rank)
        damaged = (find_damaged_file(path, name, manifest.files[name]) for name in files[mine :: len(readers)])
        problem = next(filter(None, damaged), None)
    _refuse_damage(peers, problem)
    if peers.is_first:
        try:
            head = ((path / METADATA).read_bytes(), (path / STRUCTURE).read_bytes())
        except OSError as error:
            problem = f"{path} cannot be read: {error.strerror or error}"
    problem, head = peers.broadcast((problem, head))
    if problem is not None or head is None:
        raise DamagedError(f"{peers.what}: {problem}.")
    try:
        metadata, (structure, aliases) = decode_metadata(head[0]), decode_structure(head[1])
    except Exception as error:  # raised on all ranks; the checksum matches, so the file was written like this
        raise CheckpointError(f"{peers.what}: {path} cannot be read: {type(error).__name__}: {error}") from error
    pieces = PieceReader(path, metadata)
    names = [name for name in tensor_names(structure) if name not in aliases]
    shards = {name: shard for name, shard in _shards(pieces, structure, parts).items() if name not in aliases}
    found, problem = read_tensors(
        peers, pieces, names, shards, readers, on_one_machine=peers.is_same_file(path / METADATA)
    )
    _refuse_damage(peers, problem and f"{path}: {problem}")
    for name, strides in strides_of_tensors(structure).items():
        if name in found and not is_dtensor(found[name]):
            found[name] = _laid_out(found[name], strides)
    state: dict[str, Any] = build(structure, found.__getitem__, aliases)
    return state


def _laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return `tensor` with its saved strides, unless they would take more memory, as those of a malicious file may."""
    if len(strides) != tensor.dim() or any(type(step) is not int or step < 0 for step in strides):
        return tensor
    return lay_out(tensor, strides) if is_dense(torch.empty_strided(tensor.shape, strides, device="meta")) else tensor


def _refuse_damage(peers: Peers, problem: str | None) -> None:
    mismatches = [text for text in peers.all_gather(problem) if text]
    if mismatches:
        raise DamagedError(f"{peers.what}: {mismatches[0]}.")


def _shards(pieces: PieceReader, structure: Node, parts: Mapping[str, Any]) -> dict[str, DTensor]:
    """Return new tensors to read into, sharded like the tensors of `parts`."""
    found: dict[str, DTensor] = {}
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            for key, mine in module_state(part).items():
                node = find(structure, name, key)
                if is_dtensor(mine) and node is not None and node[0] == "tensor":
                    _add_like(found, pieces, node[1], mine)
        elif isinstance(part, torch.optim.Optimizer):
            parameters = [p for group in part.param_groups for p in group["params"]]
            for number, parameter in enumerate(parameters):
                node = find(structure, name, "state", number)
                if is_dtensor(parameter) and node is not None:
                    for _, inner in node[1]:
                        if inner[0] == "tensor":
                            _add_like(found, pieces, inner[1], parameter)
    return found


def _add_like(found: dict[str, DTensor], pieces: PieceReader, name: str, like: DTensor) -> None:
    if name not in set(pieces.names()):
        return
    shape, dtype = pieces.form(name)
    if shape == like.shape:
        found[name] = cast("DTensor", torch.empty_like(like, dtype=dtype, requires_grad=False))


def _moved(value: Any, device: str | torch.device) -> Any:
    if str(device) == "cpu":
        return value
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (dict, OrderedDict) or hasattr(value, "_metadata"):
        made = type(value)((key, _moved(item, device)) for key, item in value.items())
        if hasattr(value, "__dict__"):
            vars(made).update(vars(value))  # the versions of modules
        return made
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
