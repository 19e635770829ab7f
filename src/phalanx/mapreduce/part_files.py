"""Write the result to files, atomically: one per partition, with a JSON list [key, value] per line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from phalanx.checkpoint.atomic import replace_file

_NAME = re.compile(r"part-\d{5}-of-(\d{5})\.jsonl")


def make_output_folder(folder: str, partitions: int) -> None:
    """Create the folder. Files of an earlier run with the same number of partitions will be overwritten.

    Raises:
        ValueError: the folder contains parts of a run with another number of partitions.
    """
    os.makedirs(folder, exist_ok=True)
    others = sorted(
        name for name in os.listdir(folder) if (match := _NAME.fullmatch(name)) and int(match[1]) != partitions
    )
    if others:
        raise ValueError(
            f"map_reduce: {folder} holds the result of another run ({others[0]}; this run has {partitions} "
            "partitions). Remove that result, or pass another folder."
        )


def path_of(folder: str, number: int, partitions: int) -> Path:
    """Return the path of a partition's file."""
    return Path(folder, f"part-{number:05}-of-{partitions:05}.jsonl")


def write_part(folder: str, number: int, partitions: int, read: Callable[[], Iterable[tuple[Any, Any]]]) -> None:
    """Write the pairs that `read` returns to a partition's file, durably; replace an existing file.

    Raises:
        TypeError: a key or value cannot be written as JSON.
        OSError: the disk is full or fails.
    """
    replace_file(
        path_of(folder, number, partitions),
        lambda file: file.writelines(_line(key, value) for key, value in read()),
    )


def read_parts(folder: str | os.PathLike[str]) -> Iterable[tuple[Any, Any]]:
    """Yield the pairs in a folder's files, as JSON represents them: file by file, each file sorted by key."""
    for name in sorted(os.listdir(folder)):
        if _NAME.fullmatch(name):
            with open(Path(folder, name), encoding="utf-8") as file:
                for line in file:
                    key, value = json.loads(line)
                    yield key, value


def _line(key: Any, value: Any) -> bytes:
    try:
        return (json.dumps([key, value], ensure_ascii=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"map_reduce: key {key!r:.80} with value {value!r:.80} cannot be written as JSON: {error}.\n"
            "Let reduce return values that JSON supports, or leave `output` out and write the result's items yourself."
        ) from error
