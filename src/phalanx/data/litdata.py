"""Read shards of litData: the chunks of an optimized dataset."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from phalanx._base.extras import require
from phalanx.data.stream import Stream
from phalanx.errors import DataError

_MOST_OPEN = 64  # the maximum number of open chunks per process; litData itself keeps one or four
_ROWS = 1024  # the samples of a shard, if the chunks' sizes do not add up to the dataset's


def from_litdata(dataset: Any, **options: Any) -> Stream:
    """Return a stream over the output of `litdata.optimize`, with the samples of `litdata.StreamingDataset`.

    Arguments:
        dataset: a `litdata.StreamingDataset`, whose `shuffle` has no effect, or the folder or address of one.
        options: options of `Stream`; `lengths` come from litData, and `interleave` defaults to 4.

    Cost: chunks are read by index, as in litData; remote chunks are downloaded whole into its cache. A switch to
    another chunk takes 0.2 ms, so many lanes cost more than with other formats.

    Raises:
        ModuleNotFoundError: litdata is not installed.
        DataError: there is no such dataset.
    """
    litdata = require("litdata", extra="data", what="from_litdata")
    try:
        made, is_own = dataset, isinstance(dataset, str | os.PathLike)
        if is_own:
            made = litdata.StreamingDataset(os.fspath(dataset), item_loader=_make_loader())
        total = len(made)
        sizes = [end - begin for begin, end in made.region_of_interest]
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"from_litdata: {error}") from error
    if sum(sizes) != total:
        sizes = [min(_ROWS, total - begin) for begin in range(0, total, _ROWS)]
    begins = [0, *accumulate(sizes)][:-1]
    shards = list(zip(begins, sizes, strict=True))
    return Stream(shards, _Read(made, is_own=is_own), lengths=sizes, **{"interleave": 4, **options})


class _Read:
    """`_Read` opens the dataset once per process. `is_own` says whether `from_litdata` created the dataset."""

    def __init__(self, dataset: Any, *, is_own: bool) -> None:
        self._dataset, self._is_own = dataset, is_own
        self._of_process = -1

    def __call__(self, shard: tuple[int, int]) -> Samples:
        if self._of_process != os.getpid():
            self._dataset, self._of_process = self._closed(), os.getpid()
            if self._is_own:
                self._dataset[shard[0]]  # reading a sample sets up the dataset
                self._dataset.item_loader.set_posix_fast(True, keep=_MOST_OPEN)
        return Samples(self._dataset, *shard)

    def _closed(self) -> Any:
        dataset = copy.copy(self._dataset)
        dataset.cache = None
        if self._is_own:
            dataset.item_loader = _make_loader()
        return dataset

    def __getstate__(self) -> dict[str, Any]:
        return {"_dataset": self._closed(), "_is_own": self._is_own, "_of_process": -1}


def _make_loader() -> Any:
    return require("litdata.streaming.item_loader", extra="data", what="from_litdata").PyTreeLoader()


class Samples(Sequence[Any]):
    """`Samples` are `length` samples of a dataset, starting at number `begin`."""

    def __init__(self, dataset: Any, begin: int, length: int) -> None:
        self._dataset, self._begin, self._length = dataset, begin, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: Any) -> Any:
        return self._dataset[self._begin + number]
