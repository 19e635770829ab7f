"""Check the user's list of shards: a single path must not be split into letters."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from typing import Any


def list_shards(called: str, what: str, shards: Iterable[Any]) -> list[Any]:
    """Return `shards` as a list.

    Raises:
        TypeError: `shards` is one path, or a pattern of paths.
    """
    if isinstance(shards, str | bytes | os.PathLike):
        pattern = glob.has_magic(os.fspath(shards))
        advice = f"sorted(glob.glob({os.fspath(shards)!r}))" if pattern else f"[{shards!r}]"
        raise TypeError(f"{called}: {what} must be a list, got the {type(shards).__name__} {shards!r}: give {advice}")
    return list(shards)


def list_paths(called: str, files: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the paths of `files`.

    Raises:
        TypeError: `files` is one path, or has an element that is not a path.
    """
    return [os.fspath(one) for one in list_shards(called, "files", files)]
