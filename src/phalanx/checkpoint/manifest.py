"""A manifest lists a checkpoint's files with lengths and checksums; it is written last and read first."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from phalanx.checkpoint.checksum import checksum_of
from phalanx.errors import CheckpointError

MANIFEST = "checkpoint.json"
VERSION = 1
_TITLE = "phalanx checkpoint"
_NOTES = ("orders", "classes", "metrics")  # omitted if empty

Kind = Literal["whole", "sharded"]


@dataclass(frozen=True)
class FileRecord:
    """`FileRecord` is the expected length and CRC-32 of a file."""

    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """`Manifest` describes a checkpoint, of kind "whole" (torch.save) or "sharded" (torch.distributed.checkpoint)."""

    kind: Kind
    step: int
    world_size: int
    created: str  # in ISO 8601, UTC
    torch: str
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    orders: Mapping[str, list[str]] = field(default_factory=dict)
    """The names of each optimizer's parameters, by number, if known."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """The class of each optimizer in torch.optim, if known."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics that the caller measured for the state, by name."""

    @property
    def nbytes(self) -> int:
        """Return the total size of all files."""
        return sum(record.nbytes for record in self.files.values())

    def encode(self) -> bytes:
        """Return the manifest as text with its own checksum, which detects any change."""
        content = {"title": _TITLE, "version": VERSION, **asdict(self)}
        for name in _NOTES:
            if not content[name]:  # older manifests do not have these entries
                del content[name]
        body = json.dumps(content, indent=1, sort_keys=True)
        return json.dumps({**content, "crc32": zlib.crc32(body.encode())}, indent=1, sort_keys=True).encode()

    @classmethod
    def decode(cls, text: bytes) -> Manifest:
        """Decode the result of `encode`.

        Raises:
            ValueError: the text is not a result of `encode`.
        """
        try:
            content: dict[str, Any] = json.loads(text)
            if content.get("title") != _TITLE:
                raise ValueError("it is not the manifest of a checkpoint")
            if content.get("version") != VERSION:
                raise ValueError(f"it has version {content.get('version')}, but this Phalanx reads version {VERSION}")
            names = ("kind", "step", "world_size", "created", "torch")
            files = {name: FileRecord(**record) for name, record in content["files"].items()}
            for name in files:
                if name in ("", ".", "..") or os.path.basename(name) != name:  # a download would write it elsewhere
                    raise ValueError(f"{name!r} is not a valid file name in a checkpoint")
            notes = {name: content.get(name, {}) for name in _NOTES}
            manifest = cls(**{name: content[name] for name in names}, files=files, **notes)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"it cannot be read: {type(error).__name__}: {error}") from None
        if manifest.encode() != text:
            raise ValueError("it does not match its checksum")
        return manifest


def is_checkpoint(folder: Path) -> bool:
    """Return whether `folder` is a checkpoint: it has a manifest, intact or damaged."""
    return os.path.isfile(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of `folder`.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        return Manifest.decode(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def find_damaged_file(folder: Path, name: str, record: FileRecord) -> str:
    """Return a description of how a file differs from its manifest; "" if it does not. Reads the whole file."""
    path = folder / name
    try:
        if (size := path.stat().st_size) != record.nbytes:
            return f"{path} has {size:,} bytes, but {record.nbytes:,} were written"
        crc = checksum_of(path)
    except OSError as error:
        return f"{path} could not be read: {error.strerror or error}"
    return "" if crc == record.crc32 else f"{path} does not match its checksum: bits have changed since it was written"
