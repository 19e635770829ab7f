"""Reading a checkpoint, without running anything that a stranger may have put into it."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from phalanx.errors import CheckpointError

_ZIP_BEGINS = b"PK\x03\x04"


def load_checkpoint(path: str | os.PathLike[str], *, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """The state that `save_checkpoint` wrote to `path`, with its tensors on `map_location`.

    Not collective: each rank reads the file itself, so the path must lead to it on every host. Only tensors, numbers,
    strings and containers of them are made (torch.load's `weights_only`): a file from a stranger cannot run code.

    Raises:
        CheckpointError: there is no such file, it is cut off, or it is not a checkpoint.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            begins = file.read(len(_ZIP_BEGINS))
            if begins != _ZIP_BEGINS:
                raise CheckpointError(_describe_foreign(path, begins))
            if not zipfile.is_zipfile(file):
                size = path.stat().st_size
                raise CheckpointError(
                    f"load_checkpoint: {path} is cut off after {size} bytes: its table of contents, which comes last, "
                    "is missing. Copy it again or take an older checkpoint; save_checkpoint leaves no such file."
                )
            file.seek(0)
            state: dict[str, Any] = torch.load(file, map_location=map_location, weights_only=True)
            return state
    except OSError as error:
        raise CheckpointError(
            f"load_checkpoint: {path} could not be read: {error.strerror or error}. Check the path on this host."
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # torch.load raises whatever its reader trips over: RuntimeError, KeyError, pickle's own
        raise CheckpointError(
            f"load_checkpoint: {path} is not a checkpoint that can be opened safely: {_first_line(error)}. "
            "Save it with save_checkpoint, or open it with torch.load if you trust who made it."
        ) from error


def _describe_foreign(path: Path, begins: bytes) -> str:
    what = f"begins with {begins!r}, not with the {_ZIP_BEGINS!r} of a checkpoint" if begins else "is empty"
    return f"load_checkpoint: {path} {what}. Give the path of a file that save_checkpoint wrote."


def _first_line(error: Exception) -> str:
    unsafe = [line for line in str(error).splitlines() if "Unsupported global" in line or "GLOBAL " in line]
    return (unsafe or str(error).splitlines() or [type(error).__name__])[0].strip().rstrip(".")
