"""Shards of litData: the chunks of an optimized dataset."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from phalanx.data.stream import Stream
from phalanx.errors import DataError
from phalanx.extras import require

_ROWS = 1024  # of a shard, where the chunks' sizes are not those of what the dataset hands out


def from_litdata(dataset: Any, **options: Any) -> Stream:
    """Return a stream over what `litdata.optimize` has written; a sample is what `litdata.StreamingDataset` gives.

    Arguments:
        dataset: a `litdata.StreamingDataset`, or what makes one: a folder, or an address. Its `shuffle` has no effect.
        options: of `Stream`; `lengths` are litData's own.

    Cost: chunks are read by index, as litData reads them; those at an address are loaded whole into its cache.

    Raises:
        ModuleNotFoundError: litdata is not installed.
        DataError: there is no such dataset.
    """
    litdata = require("litdata", extra="data", what="from_litdata")
    try:
        made = litdata.StreamingDataset(os.fspath(dataset)) if isinstance(dataset, str | os.PathLike) else dataset
        total = len(made)
        sizes = [end - begin for begin, end in made.region_of_interest]
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"from_litdata: {error}") from error
    if sum(sizes) != total:
        sizes = [min(_ROWS, total - begin) for begin in range(0, total, _ROWS)]
    begins = [0, *accumulate(sizes)][:-1]
    return Stream(list(zip(begins, sizes, strict=True)), _Read(made), lengths=sizes, **options)


class _Read:
    """Opens the dataset once in each process: its readers are no more than those of the process that has it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._of_process = -1

    def __call__(self, shard: tuple[int, int]) -> Samples:
        if self._of_process != os.getpid():
            self._dataset, self._of_process = copy.copy(self._dataset), os.getpid()
            self._dataset.cache = None
        return Samples(self._dataset, *shard)

    def __getstate__(self) -> dict[str, Any]:
        dataset = copy.copy(self._dataset)
        dataset.cache = None
        return {"_dataset": dataset, "_of_process": -1}


class Samples(Sequence[Any]):
    """`length` samples of a dataset from number `begin` on."""

    def __init__(self, dataset: Any, begin: int, length: int) -> None:
        self._dataset, self._begin, self._length = dataset, begin, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: Any) -> Any:
        return self._dataset[self._begin + number]
