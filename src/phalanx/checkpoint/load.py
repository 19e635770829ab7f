"""Load a checkpoint without executing code from it."""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from phalanx._base.storage import place_of
from phalanx.checkpoint.checksum import find_damage
from phalanx.checkpoint.optimizer_fit import OptimizerNotes, describe_missing_state
from phalanx.checkpoint.parts import HALF_LOADED, describe_misfits, fit_stages, load_part
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.remote_history import RETRY_S, download
from phalanx.checkpoint.restore import find_latest, read_moved, require_device
from phalanx.errors import CheckpointError

_ZIP_BEGINS = b"PK\x03\x04"


class Stateful(Protocol):
    """`Stateful` is any object that can load a state: a model, an optimizer, a scheduler or a sampler."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load the state `state_dict`."""


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    map_location: str | torch.device = "cpu",
    into: Mapping[str, Stateful] | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Return the state that `save_checkpoint` wrote to `path`, with its tensors on `map_location`.

    `path` may also be a checkpoint of a `CheckpointManager`, or the folder of its checkpoints, whose latest is loaded.
    A checkpoint at an fsspec address (`s3://bucket/run.pt`) is downloaded first.

    A rank may call this alone: each rank reads the file itself, so every host needs the file. Only tensors, numbers,
    strings and containers of them are created (torch.load's `weights_only`), so an untrusted file cannot run code.

    Arguments:
        map_location: the device for all tensors.
        into: the objects to restore, by name: `load_state_dict` of each gets the state of that name. Before anything is
            loaded, an error reports a name that the checkpoint lacks, another shape, a dtype that cannot hold the
            values, another class of optimizer, or another order of its parameters. If the `load_state_dict` of an
            object raises, the objects before it keep the loaded state. If an optimizer gets no state for parameters
            that it trains, a warning names the parameters.
        verify: verify every record's checksum first, to detect bits that flipped on a disk or in transit. With False
            the file is read only once. A `CheckpointManager`'s checkpoint is always verified.

    Cost: one read of the file, and another for `verify`: about 0.8 s and 0.2 s for 1 GB in the page cache.

    Raises:
        CheckpointError: the file is missing, truncated or damaged, is not a checkpoint, or does not fit `into`:
            nothing has changed. Or an object in `into` refused its state: some objects may have changed.
        ValueError: this process does not have the device.
        TypeError: `into` does not map names to objects with `load_state_dict`.
    """
    require_device(map_location, "load_checkpoint")
    if into is not None:
        _require_stateful(into)
    place = place_of(path)
    if isinstance(place, Path):
        return _load_from_here(place, map_location, into, verify)
    return _load_from_address(place, map_location, into, verify)


def _load_from_address(
    address: str, map_location: str | torch.device, into: Mapping[str, Stateful] | None, verify: bool
) -> dict[str, Any]:
    try:
        with download(address, RETRY_S) as (path, shown, _):
            try:
                return _load_from_here(path, map_location, into, verify)
            except CheckpointError as error:
                error.args = (str(error).replace(str(path), shown), *error.args[1:])
                raise
    except CheckpointError as error:
        if not str(error).startswith("load_checkpoint"):
            error.args = (f"load_checkpoint: {error}", *error.args[1:])
        raise


def _load_from_here(
    path: Path, map_location: str | torch.device, into: Mapping[str, Stateful] | None, verify: bool
) -> dict[str, Any]:
    notes = OptimizerNotes()
    if os.path.isdir(path):
        state, notes = _read_folder(path, map_location)
    else:
        state = _read_file(path, map_location, verify)
    if into is not None:
        _load_into(path, state, notes, into)
    return state


def _read_folder(path: Path, map_location: str | torch.device) -> tuple[dict[str, Any], OptimizerNotes]:
    """Return a `CheckpointManager`'s checkpoint, which is always verified, and the notes on its optimizers."""
    found = find_latest(path)
    if found is None:
        raise CheckpointError(
            f"load_checkpoint: {path} is a directory without a checkpoint. Give the path of a file that "
            "save_checkpoint wrote, or of a folder of a CheckpointManager."
        )
    return read_moved(Peers.alone("load_checkpoint"), found, map_location)


def _read_file(path: Path, map_location: str | torch.device, verify: bool) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            if problem := find_wrong_form(path, file):
                raise CheckpointError(f"load_checkpoint: {problem}")
            if verify and (damage := find_damage(file)):
                raise CheckpointError(
                    f"load_checkpoint: {path} is damaged: {damage}. Bits have changed since it was written, on the "
                    "disk or in transit: copy it again or load an older checkpoint. verify=False reads it anyway."
                )
            file.seek(0)
            state: dict[str, Any] = torch.load(file, map_location=map_location, weights_only=True)
    except OSError as error:
        raise CheckpointError(
            f"load_checkpoint: {path} could not be read: {error.strerror or error}. Check the path on this host."
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # torch.load raises any error of its readers: RuntimeError, KeyError, pickle's own
        raise CheckpointError(_explain(path, error)) from error
    return state


def _require_stateful(into: object) -> None:
    if not isinstance(into, Mapping):
        raise TypeError(
            "load_checkpoint: into must be a dict of the objects to restore by name, such as "
            f"{{'model': model, 'optimizer': optimizer}}, got a {type(into).__name__}"
        )
    if wrong := [name for name, part in into.items() if not hasattr(part, "load_state_dict")]:
        raise TypeError(
            f"load_checkpoint: into[{wrong[0]!r}] is a {type(into[wrong[0]]).__name__}, which has no load_state_dict"
        )


def _load_into(path: Path, state: object, notes: OptimizerNotes, into: Mapping[str, Stateful]) -> None:
    if not isinstance(state, dict):
        raise CheckpointError(
            f"load_checkpoint: {path} holds a {type(state).__name__}, not a dict of states by name. Nothing was loaded."
        )
    if missing := [name for name in into if name not in state]:
        raise CheckpointError(
            f"load_checkpoint: {path} has no state for {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, state)) or 'nothing'}. Nothing was loaded. Leave out of `into` the objects "
            "that should start from scratch, or load a checkpoint that has their states."
        )
    stages = fit_stages(into, state, with_layout=False)
    if report := describe_misfits(into, state, stages, notes):
        raise CheckpointError(f"load_checkpoint: {path} does not fit:\n{report}\nNothing was loaded.")
    for name, part in into.items():
        try:
            own = stages[name][0] if name in stages else state[name]
            load_part(part, own, strict=True)
        except Exception as error:
            text = f"load_checkpoint: {path}: {name!r} refused its state: {type(error).__name__}: {error}"
            raise CheckpointError(f"{text}\n{HALF_LOADED}") from error
        if isinstance(part, torch.optim.Optimizer) and (gap := describe_missing_state(part, own)):
            warnings.warn(f"load_checkpoint: {path}: {name!r} {gap}", stacklevel=3)


def find_wrong_form(path: Path, file: BinaryIO) -> str:
    """Return why the content of `path` is not a whole file of torch.save, with advice; "" if it is one."""
    begins = file.read(len(_ZIP_BEGINS))
    if begins != _ZIP_BEGINS:
        what = f"begins with {begins!r}, not with the {_ZIP_BEGINS!r} of a checkpoint" if begins else "is empty"
        return f"{path} {what}. Give the path of a file that save_checkpoint wrote."
    if not zipfile.is_zipfile(file):
        return (
            f"{path} is cut off after {path.stat().st_size} bytes: its table of contents, which comes last, is "
            "missing. Copy it again or load an older checkpoint; save_checkpoint never leaves a partial file."
        )
    return ""


def _explain(path: Path, error: Exception) -> str:
    if isinstance(error, zipfile.BadZipFile):
        return (
            f"load_checkpoint: {path} is damaged: its table of contents: {error}. Copy it again or load an older "
            "checkpoint."
        )
    if isinstance(error, pickle.UnpicklingError):
        reason = _first_line(error)
    elif not _has_pickle(path):
        reason = "it is a zip archive without the data.pkl that torch.save writes"
    else:
        return (
            f"load_checkpoint: {path} cannot be loaded: {type(error).__name__}: {_first_line(error)}. It has the "
            "form of a checkpoint; if you trust its author, torch.load reports more."
        )
    return (
        f"load_checkpoint: {path} is not a checkpoint that can be opened safely: {reason}. "
        "Save it with save_checkpoint, or open it with torch.load if you trust its author."
    )


def _has_pickle(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/data.pkl") for name in archive.namelist())


def _first_line(error: Exception) -> str:
    unsafe = [line for line in str(error).splitlines() if "Unsupported global" in line or "GLOBAL " in line]
    return (unsafe or str(error).splitlines() or [type(error).__name__])[0].strip().rstrip(".")
