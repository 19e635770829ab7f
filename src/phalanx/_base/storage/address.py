"""Tell whether a name is that of a file here, or an address such as `s3://bucket/key`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, cast

from phalanx._base.extras import require

# The packages behind the schemes for which fsspec has no reader of its own.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4", ".snappy")
_PACKAGES = {"s3": "s3fs", "gcs": "gcsfs", "azure": "adlfs"}


def is_address(name: object) -> bool:
    """Return whether `name` is an address that is none of this machine's files: `s3://...`, `memory://...`."""
    scheme, mark, _ = str(name).partition("://")
    return bool(mark) and scheme not in ("file", "local") and scheme.replace("+", "").replace("::", "").isalnum()


def place_of(name: str | os.PathLike[str]) -> Path | str:
    """Return an address, without a slash behind it, or the path of a file of this machine (`file:///a`, too)."""
    text = os.fspath(name)
    if is_address(text):
        return text.rstrip("/")
    scheme, mark, path = text.partition("://")
    return Path(path if mark and scheme in ("file", "local") else text)


def split_address(address: str, options: dict[str, Any] | None = None) -> tuple[Any, str]:
    """Return the file system of fsspec that an address is of, and the path in it.

    Raises:
        ModuleNotFoundError: the package that reads this kind of address is not installed; it names the extra.
        ValueError: fsspec knows no such kind.
    """
    import fsspec

    _require_package(address)
    files, path = fsspec.core.url_to_fs(address, **(options or {}))
    return files, str(path)


def _require_package(address: str) -> None:
    extra = _EXTRAS.get(address.partition("://")[0].rpartition("::")[2])
    if extra is not None:
        require(_PACKAGES[extra], extra=extra, what=f"the address {address}")


def open_for_reading(
    name: str | os.PathLike[str], options: dict[str, Any] | None = None, *, compression: str | None = None
) -> BinaryIO:
    """Return a file of this machine, or at an address, opened for reading bytes.

    Arguments:
        options: of the file system of fsspec.
        compression: what it is unpacked from; "infer" goes by the end of its name.

    Raises:
        FileNotFoundError: there is none.
    """
    path = os.fspath(name)
    packed = compression is not None and path.endswith(_PACKED)
    if not is_address(path) and not packed:
        return open(path.removeprefix("file://"), "rb")
    import fsspec

    _require_package(path)
    return cast(BinaryIO, fsspec.open(path, "rb", compression=compression, **(options or {})).open())
