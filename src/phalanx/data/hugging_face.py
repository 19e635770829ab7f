"""Read a dataset of Hugging Face's `datasets`: by the shards of a streamed dataset, or by ranges of rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from phalanx._base.extras import require
from phalanx.data.stream import Stream

_ROWS_AT_ONCE = 64


def from_datasets(dataset: Any, *, rows_per_shard: int = 1000, **options: Any) -> Stream:
    """Return a stream over a Hugging Face Dataset, or an IterableDataset (`load_dataset(..., streaming=True)`).

    Arguments:
        dataset: one split. Do not shuffle it: the stream shuffles.
        rows_per_shard: the number of rows of a `Dataset` that form a shard.
        options: options of `Stream`. Without `lengths`, the samples of an IterableDataset are counted by reading it;
            pass `index` to keep the counts.

    Cost: rows of a `Dataset` are read by index, several at a time; shards of an IterableDataset are read in sequence.

    Raises:
        ModuleNotFoundError: datasets is not installed.
        TypeError: `dataset` is neither of the two, or has several splits.
        ValueError: `rows_per_shard` is not at least 1.
    """
    if rows_per_shard < 1:
        raise ValueError(f"from_datasets: rows_per_shard must be 1 or more, got {rows_per_shard}")
    datasets = require("datasets", extra="data", what="from_datasets")
    if isinstance(dataset, datasets.IterableDataset):
        return Stream(list(range(dataset.num_shards)), _IterableShardReader(dataset), **options)
    if not isinstance(dataset, datasets.Dataset):
        advice = ": pass one split, dataset['train']" if isinstance(dataset, dict) else ""
        raise TypeError(f"from_datasets takes a Dataset or an IterableDataset, got a {type(dataset).__name__}{advice}")
    rows = len(dataset)
    sizes = [min(rows_per_shard, rows - begin) for begin in range(0, rows, rows_per_shard)]
    begins = range(0, rows, rows_per_shard)
    return Stream(list(zip(begins, sizes, strict=True)), _Read(dataset), lengths=sizes, **options)


class _Read:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, shard: tuple[int, int]) -> Rows:
        return Rows(self._dataset, *shard)


class Rows:
    """`Rows` are `length` rows of a table, starting at row `begin`."""

    def __init__(self, dataset: Any, begin: int, length: int) -> None:
        self._dataset, self._begin, self._length = dataset, begin, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        return self._dataset[self._begin + number]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return several rows with one read."""
        return list(self._dataset.__getitems__([self._begin + number for number in numbers]))


class _IterableShardReader:
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self, shard: int) -> Iterator[Any]:
        # Iterating over the shard itself would divide it among a DataLoader's workers, and most would get nothing.
        for batch in self._dataset.shard(num_shards=self._dataset.num_shards, index=shard).iter(_ROWS_AT_ONCE):
            for number in range(len(next(iter(batch.values())))):
                yield {name: column[number] for name, column in batch.items()}
