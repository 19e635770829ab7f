"""A `Stream` is a dataset of shards that are read in sequence, in an order independent of the number of ranks."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from phalanx._base.log import get_logger
from phalanx._base.storage import is_address, open_for_reading, split_address
from phalanx.data.open_shards import OpenShards
from phalanx.data.ordered import OrderedDataset, epoch_key
from phalanx.data.permutation import Indices
from phalanx.data.stream_order import StreamLayout, StreamOrder, describe_order
from phalanx.errors import DataError, summary_of


class UnreadableSample(Exception):
    """A transform raises this for a sample that it cannot read; the stream adds which sample it is."""


class Stream(OrderedDataset):
    """Read the samples of `shards`; `phalanx.DistributedSampler` uses the stream's order.

        def read(url):
            with open(url) as file:
                yield from map(json.loads, file)

        stream = phalanx.data.Stream(urls, read, lengths=1000)
        sampler = phalanx.DistributedSampler(stream)
        loader = DataLoader(stream, batch_size=64, sampler=sampler, num_workers=4)

    It is a map-style dataset with all guarantees of the sampler, even with workers: no sample is lost or repeated if a
    job continues in the middle of an epoch with another number of ranks or workers. `phalanx.data.stream_order` defines
    the order of an epoch. It depends only on the lengths of the shards, the seed, the epoch and the four numbers
    `interleave`, `readers`, `block` and `window`. A position is two numbers: the epoch, and the samples consumed.

    Cost: each epoch begins with a few computations for each shard (milliseconds for 10,000 shards). A shard that cannot
    be read by index keeps up to `window` samples in memory. Resuming inside a shard costs nothing with an index;
    otherwise the shard's beginning is read again, or skipped if its iterator has `skip`. Each shard is read by exactly
    one worker if the number of ranks divides `interleave`, the number of workers per rank divides `readers`, and a step
    has `block` samples in total. Otherwise several workers, possibly all, read a shard, and each uses a part of it.

    Arguments:
        shards: names, addresses, numbers, or any other arguments of `read`.
        read: returns the samples of a shard: a sequence (`len()` and `[number]`), which is read by index, or any
            iterable, which is read in sequence. It is called in the DataLoader's workers.
        lengths: the number of samples of each shard, or one number for all. By default the samples are counted.
        index: a file, local or remote, that keeps the counted lengths for the next run.
        count: returns the number of samples of a shard. Default: by `len()` or by reading it.
        transform: applied to each returned sample, in the worker.
        interleave: the number of shards whose samples are mixed.
        readers: the number of workers of a rank that read their own shards.
        block: the number of samples in a step of all ranks together.
        window: the number of consecutive samples of a shard that are shuffled together.
        retry_s: for how many seconds reads with network errors are retried.

    Raises:
        ValueError, TypeError: an argument is invalid.
        DataError: a shard cannot be counted; or later, it cannot be read or has a different number of samples.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[[Any], Any],
        *,
        lengths: int | Sequence[int] | None = None,
        index: str | os.PathLike[str] | None = None,
        count: Callable[[Any], int] | None = None,
        transform: Callable[[Any], Any] | None = None,
        interleave: int = 12,
        readers: int = 4,
        block: int = 64,
        window: int = 128,
        retry_s: float = 60.0,
    ) -> None:
        self.shards = list_shards("Stream", "shards", shards)
        if not callable(read):
            raise TypeError(f"Stream: read must be a function of a shard, got a {type(read).__name__}")
        if not retry_s >= 0:
            raise ValueError(f"Stream: retry_s must be zero seconds or more, got {retry_s!r}")
        self.layout = StreamLayout(interleave, readers, block, window)
        if not self.shards:
            raise ValueError("Stream: there is no shard")
        self._read, self._transform, self._retry_s = read, transform, retry_s
        self.lengths = find_lengths(self.shards, lengths, index, count or self._count)
        if not self.lengths.any():
            raise ValueError(f"Stream: there is no sample in {len(self.shards)} shard{'s' * (len(self.shards) > 1)}")
        self._ends = np.cumsum(self.lengths)
        self._open: OpenShards | None = None
        self._latest: tuple[str | None, StreamOrder] | None = None

    def _count(self, shard: Any) -> int:
        samples = self._read(shard)
        try:
            return len(samples)
        except TypeError:
            return sum(1 for _ in samples)

    def __len__(self) -> int:
        """Return the number of samples of all shards."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        """Return a sample by its number, counted through all shards in the order given."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples. PyTorch's DataLoader calls this for a batch."""
        wanted = np.asarray(indices, dtype=np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if (wrong := wanted[(wanted < 0) | (wanted >= len(self))]).size:
            raise IndexError(f"Stream: sample {wrong[0]} was requested, but the samples are 0 to {len(self) - 1}")
        shards = np.searchsorted(self._ends, wanted.astype(np.uint64), side="right")
        samples: list[Any] = [None] * len(wanted)
        for shard in dict.fromkeys(shards.tolist()):
            places = np.flatnonzero(shards == shard).tolist()
            begin = int(self._ends[shard] - self.lengths[shard])
            for place, sample in zip(places, self._shards().get(shard, (wanted[places] - begin).tolist()), strict=True):
                samples[place] = sample
        if self._transform is None:
            return samples
        return [self._transform_sample(self._transform, *one) for one in zip(samples, wanted.tolist(), strict=True)]

    def _transform_sample(self, transform: Callable[[Any], Any], sample: Any, index: int) -> Any:
        try:
            return transform(sample)
        except UnreadableSample as error:
            shard = int(np.searchsorted(self._ends, np.uint64(index), side="right"))
            number = index - int(self._ends[shard] - self.lengths[shard])
            raise DataError(
                f"Stream: sample {number} of shard {shard}, {self.shards[shard]}, cannot be read: {error}"
            ) from error.__cause__

    def _shards(self) -> OpenShards:
        if self._open is None:
            lanes = self.layout.interleave * self.layout.readers
            self._open = OpenShards(
                self._read,
                self.shards,
                self.lengths.tolist(),
                window=self.layout.window,
                most=lanes,
                retry_s=self._retry_s,
            )
        return self._open

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> StreamOrder:
        """Return the order of an epoch."""
        key = epoch_key(seed, epoch) if shuffle else None
        if self._latest is None or self._latest[0] != key:
            self._latest = key, StreamOrder(self.lengths, self.layout, key)
        return self._latest[1]

    def describe_order(self) -> dict[str, Any]:
        """Return what determines the order: a saved position is valid only for the same values."""
        return describe_order([name_of(shard) for shard in self.shards], self.lengths, self.layout)

    def close(self) -> None:
        """Close the shards that this process has open."""
        if self._open is not None:
            self._open.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned worker, without open shards."""
        return {**self.__dict__, "_open": None, "_latest": None}


# Find the number of samples of each shard: it is given, read from an index file, or counted once and written there.
#
# {"phalanx_index": 1, "shards": {"data/a.tar": 1000, "data/b.tar": 998}}

_logger = get_logger(__name__)
_VERSION = 1
_THREADS = 16  # many, because counting waits for disks and networks
_SLOW_S = 2.0

Count = Callable[[Any], int]


def name_of(shard: Any) -> str:
    """Return the name by which a saved position and an index file identify a shard.

    Raises:
        ValueError: the shard's class defines neither `__str__` nor `__repr__`, so its text is only a memory address.
    """
    kind: Any = type(shard)
    if (kind.__str__, kind.__repr__) == (object.__str__, object.__repr__):
        raise ValueError(
            f"Stream: a shard is a {kind.__name__}, whose repr has only its memory address, which does not "
            "identify it in another process. Give the class a __repr__ that names the shard."
        )
    return str(shard)


def find_lengths(
    shards: Sequence[Any], lengths: int | Sequence[int] | None, index: str | os.PathLike[str] | None, count: Count
) -> Indices:
    """Return the length of each shard.

    With `index`, lengths come from that file, and missing ones are counted and written to it. Of several processes on
    this machine, one counts, and the others wait for it (not if the file is remote).

    Raises:
        ValueError: there are not as many `lengths` as shards, or one is not an int of at least 0.
        DataError: a shard cannot be counted, or the index file cannot be read.
    """
    if lengths is not None:
        return _check(shards, [lengths] * len(shards) if isinstance(lengths, int) else list(lengths))
    if index is None:
        return _check(shards, _count_all(shards, count, "pass `index=`, a file that stores the lengths"))
    name = os.fspath(index)
    known = _read_index(name)
    if any(name_of(shard) not in known for shard in shards):
        with _alone(name):
            known = _read_index(name)
            missing = [shard for shard in shards if name_of(shard) not in known]
            if missing:
                counted = _count_all(missing, count, f"they are kept in {name}")
                checked = _check(missing, counted).tolist()  # before they are written
                known |= {name_of(shard): length for shard, length in zip(missing, checked, strict=True)}
                _write_index(name, known)
    return _check(shards, [known[name_of(shard)] for shard in shards])


def _check(shards: Sequence[Any], lengths: Sequence[Any]) -> Indices:
    if len(lengths) != len(shards):
        raise ValueError(f"Stream: {len(lengths)} lengths for {len(shards)} shards: pass one length for each")
    wrong = [(shard, n) for shard, n in zip(shards, lengths, strict=True) if not _is_length(n)]
    if wrong:
        raise ValueError(f"Stream: the length of shard {wrong[0][0]} must be 0 samples or more, got {wrong[0][1]!r}")
    return np.array([int(n) for n in lengths], dtype=np.uint64)


def _is_length(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool) and int(value) >= 0


def _count_all(shards: Sequence[Any], count: Count, advice: str) -> list[int]:
    started = time.monotonic()
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
    took = time.monotonic() - started
    if took > _SLOW_S:
        _logger.warning(
            "Stream: the samples of %d shards were counted in %.1f s, because `lengths` was not given: %s.",
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
        raise DataError(
            f"Stream: {name} is not an index file of this version: remove the file to count the shards again"
        )
    return dict(shards)


def _write_index(name: str, lengths: Mapping[str, int]) -> None:
    """Write the file, atomically if it is local."""
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
    """Exclude other processes on this machine that count for an index file in the same folder; not if it is remote."""
    if is_address(name):
        yield
        return
    folder = os.open(os.path.dirname(os.path.abspath(name)), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)  # unlock: a process that was forked meanwhile also has the descriptor
        os.close(folder)


def list_shards(called: str, what: str, shards: Iterable[Any]) -> list[Any]:
    """Return the user's `shards` as a list. Refuse a single path, which would be split into characters.

    Raises:
        TypeError: `shards` is one path, or a pattern of paths.
    """
    if isinstance(shards, str | bytes | os.PathLike):
        pattern = glob.has_magic(os.fspath(shards))
        advice = f"sorted(glob.glob({os.fspath(shards)!r}))" if pattern else f"[{shards!r}]"
        raise TypeError(f"{called}: {what} must be a list, got the {type(shards).__name__} {shards!r}: pass {advice}")
    return list(shards)


def list_paths(called: str, files: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return the paths of `files`.

    Raises:
        TypeError: `files` is one path, or has an element that is not a path.
    """
    return [os.fspath(one) for one in list_shards(called, "files", files)]
