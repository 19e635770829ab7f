"""A `Stream` is a dataset of shards, read on from their beginnings, in an order that no number of ranks changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from phalanx.data.open_shards import OpenShards
from phalanx.data.ordered import OrderedDataset, epoch_key
from phalanx.data.shard_lengths import find_lengths
from phalanx.data.shard_names import list_shards
from phalanx.data.stream_order import StreamLayout, StreamOrder, describe_order
from phalanx.errors import DataError


class UnreadableSample(Exception):
    """A transform that is a part of reading raises this; the stream says where the sample is."""


class Stream(OrderedDataset):
    """Read the samples of `shards`, shard after shard; `phalanx.DistributedSampler` takes them in the stream's order.

        def read(url):
            with open(url) as file:
                yield from map(json.loads, file)

        stream = phalanx.data.Stream(urls, read, lengths=1000)
        sampler = phalanx.DistributedSampler(stream)
        loader = DataLoader(stream, batch_size=64, sampler=sampler, num_workers=4)

    It is a map-style dataset: everything that takes one takes a stream, and all that the sampler promises holds, with
    workers, too: no sample is lost and none comes twice, also where a job goes on in the middle of an epoch with other
    ranks or workers. The order of an epoch is that of `phalanx.data.stream_order`; it depends on the lengths of the
    shards, the seed, the epoch and the four numbers below, and on nothing else. A position in it is two numbers.

    Cost: at the start of an epoch some numbers for each shard (10,000 take milliseconds); `window` samples in memory
    for each open shard that has no index. To go on inside of a shard costs nothing where it has an index; else what
    comes before is read again, or skipped, if its iterator has `skip`. Where the ranks of the job divide `interleave`,
    the workers of a rank divide `readers`, and a step has `block` samples in all, each shard is read by one worker of
    one rank; otherwise by up to as many workers as there are, each of which hands out its part.

    Arguments:
        shards: names, addresses, numbers, or whatever `read` takes.
        read: returns the samples of a shard: a sequence (`len()` and `[number]`), which is read by index, or any
            iterable, which is read on. It is called in the DataLoader's workers.
        lengths: the samples of each shard, or one number, if all have as many. Without it they are counted.
        index: a file in which the counted lengths are kept, and from which they are read the next time; or its address.
        count: how to count a shard; by default `read` it, and count.
        transform: of each sample that is handed out, in the worker.
        interleave: from so many shards samples are mixed.
        readers: so many workers of a rank read shards of their own.
        block: the samples of a step, of all ranks together.
        window: samples of a shard are shuffled inside of windows of so many.
        retry_s: for how long a read that fails as networks do is tried again.

    Raises:
        ValueError, TypeError: an argument makes no sense.
        DataError: a shard cannot be counted; later, one cannot be read, or has not as many samples as was said.
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
        """Return how many samples all shards have."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        """Return a sample by its number among all, shard after shard."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples: PyTorch's DataLoader calls this for a batch."""
        wanted = np.asarray(indices, dtype=np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(
                f"Stream: there are samples 0 to {len(self) - 1}, and one of {list(indices)[:4]} is asked for"
            )
        shards = np.searchsorted(self._ends, wanted.astype(np.uint64), side="right")
        samples: list[Any] = [None] * len(wanted)
        for shard in dict.fromkeys(shards.tolist()):
            places = np.flatnonzero(shards == shard).tolist()
            begin = int(self._ends[shard] - self.lengths[shard])
            for place, sample in zip(places, self._shards().get(shard, (wanted[places] - begin).tolist()), strict=True):
                samples[place] = sample
        if self._transform is None:
            return samples
        return [self._hand_out(self._transform, *one) for one in zip(samples, wanted.tolist(), strict=True)]

    def _hand_out(self, transform: Callable[[Any], Any], sample: Any, index: int) -> Any:
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
        """Return what makes the order: a saved position belongs to the same order only."""
        return describe_order([str(shard) for shard in self.shards], self.lengths, self.layout)

    def close(self) -> None:
        """Close the shards that this process has open."""
        if self._open is not None:
            self._open.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker that is spawned, without open files."""
        return {**self.__dict__, "_open": None, "_latest": None}
