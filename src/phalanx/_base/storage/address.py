"""Distinguish the path of a local file from an address such as `s3://bucket/key`, and open either for reading."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, cast

from phalanx._base.extras import require

# the extras of schemes for which fsspec needs another package
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4", ".snappy")
_PACKAGES = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs"}


def is_address(name: object) -> bool:
    """Return whether `name` is an address, not a local file: `s3://...`, `memory://...`."""
    scheme, mark, _ = str(name).partition("://")
    return bool(mark) and scheme not in ("file", "local") and scheme.replace("+", "").replace("::", "").isalnum()


def place_of(name: str | os.PathLike[str]) -> Path | str:
    """Return `name` as an address, without a trailing slash, or as the path of a local file (also `file:///a`)."""
    text = os.fspath(name)
    if is_address(text):
        return text.rstrip("/")
    scheme, mark, path = text.partition("://")
    return Path(path if mark and scheme in ("file", "local") else text)


def split_address(address: str) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the path in it.

    Raises:
        ModuleNotFoundError: the package for this scheme is not installed; the message names the extra.
        ValueError: fsspec does not know the scheme.
    """
    import fsspec

    _require_package(address)
    files, path = fsspec.core.url_to_fs(address)
    return files, str(path)


def _require_package(address: str) -> None:
    extra = _EXTRAS.get(address.partition("://")[0].rpartition("::")[2])
    if extra is not None:
        require(_PACKAGES[extra], extra=extra, what=f"the address {address}")


def open_for_reading(name: str | os.PathLike[str], *, compression: str | None = None) -> BinaryIO:
    """Open a local file, or an address, for reading bytes.

    Arguments:
        compression: the format to unpack; "infer" decides by the name's ending.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = os.fspath(name)
    packed = compression is not None and path.endswith(_PACKED)
    if not is_address(path) and not packed:
        return open(place_of(path), "rb")
    import fsspec

    _require_package(path)
    return cast(BinaryIO, fsspec.open(path, "rb", compression=compression).open())
