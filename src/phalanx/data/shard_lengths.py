"""Find how many samples each shard has: given, read from an index file, or counted once and written there.

{"phalanx_index": 1, "shards": {"data/a.tar": 1000, "data/b.tar": 998}}
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from phalanx._base.log import get_logger
from phalanx._base.storage import is_address, open_for_reading, split_address
from phalanx.data.permutation import Indices
from phalanx.errors import DataError, summary_of

_logger = get_logger(__name__)
_VERSION = 1
_THREADS = 16  # counting waits for disks and networks
_SLOW_S = 2.0

Count = Callable[[Any], int]


def find_lengths(
    shards: Sequence[Any], lengths: int | Sequence[int] | None, index: str | os.PathLike[str] | None, count: Count
) -> Indices:
    """Return the length of each shard.

    With `index` the lengths in that file count, and missing ones are counted and written; of several processes of this
    machine one counts, and the others wait for it.

    Raises:
        ValueError: `lengths` are not as many as shards, or no numbers.
        DataError: a shard cannot be counted, or the index file cannot be read.
    """
    if lengths is not None:
        return _check(shards, [lengths] * len(shards) if isinstance(lengths, int) else list(lengths))
    if index is None:
        return _check(shards, _count_all(shards, count, "give `index=`, a file to keep the lengths in"))
    name = os.fspath(index)
    known = _read_index(name)
    if any(str(shard) not in known for shard in shards):
        with _alone(name):
            known = _read_index(name)
            missing = [shard for shard in shards if str(shard) not in known]
            if missing:
                counted = _count_all(missing, count, f"they are kept in {name}")
                known |= {str(shard): length for shard, length in zip(missing, counted, strict=True)}
                _write_index(name, known)
    return _check(shards, [known[str(shard)] for shard in shards])


def _check(shards: Sequence[Any], lengths: Sequence[Any]) -> Indices:
    if len(lengths) != len(shards):
        raise ValueError(f"Stream: {len(lengths)} lengths for {len(shards)} shards: give one for each")
    wrong = [(shard, n) for shard, n in zip(shards, lengths, strict=True) if not _is_length(n)]
    if wrong:
        raise ValueError(f"Stream: the length of shard {wrong[0][0]} must be 0 samples or more, got {wrong[0][1]!r}")
    return np.array([int(n) for n in lengths], dtype=np.uint64)


def _is_length(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and int(value) >= 0


def _count_all(shards: Sequence[Any], count: Count, advice: str) -> list[int]:
    begun = time.monotonic()
    with ThreadPoolExecutor(_THREADS, "count shards") as pool:
        jobs = [pool.submit(count, shard) for shard in shards]
        lengths = []
        for shard, job in zip(shards, jobs, strict=True):
            try:
                lengths.append(job.result())
            except Exception as error:
                for other in jobs:
                    other.cancel()
                raise DataError(
                    f"Stream: the samples of shard {shard} cannot be counted: {summary_of(error)}"
                ) from error
    took = time.monotonic() - begun
    if took > _SLOW_S:
        _logger.warning(
            "Stream: the samples of %d shards were counted in %.1f s, as nobody had said how many there are: %s.",
            len(shards),
            took,
            advice,
        )
    return lengths


def _read_index(name: str) -> dict[str, int]:
    try:
        with open_for_reading(name) as file:
            content = json.loads(file.read())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"Stream: the index file {name} cannot be read: {summary_of(error)}") from error
    shards = content.get("shards") if isinstance(content, Mapping) else None
    if not isinstance(shards, Mapping) or content.get("phalanx_index") != _VERSION:
        raise DataError(f"Stream: {name} is no index file of this version: remove it, and the shards are counted again")
    return dict(shards)


def _write_index(name: str, lengths: Mapping[str, int]) -> None:
    """Write the file, whole or not at all."""
    content = json.dumps({"phalanx_index": _VERSION, "shards": dict(lengths)}, indent=0).encode()
    if is_address(name):
        files, path = split_address(name)
        files.pipe_file(path, content)
        return
    part = f"{name}.{os.getpid()}.partial"
    with open(part, "wb") as file:
        file.write(content)
    os.replace(part, name)


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """Let no other process of this machine count for the same index file meanwhile; at an address, each may."""
    if is_address(name):
        yield
        return
    folder = os.open(os.path.dirname(os.path.abspath(name)), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor, too
        os.close(folder)
