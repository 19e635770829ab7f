"""An `IterableLoader` divides an iterable dataset: each replica reads all samples and keeps its share of each batch.

global batch of 8     s0 s1 s2 s3 s4 s5 s6 s7 | s8 s9                  the last batch has two samples
replica 0 of 3        s0 s1                   | (s8)                   no sample of its own: s8 does not count here
replica 1             s2 s3 s4                | s8
replica 2             s5 s6 s7                | s9
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from phalanx.data.random_stream import RandomStream, epoch_seed


class IterableLoader(DataLoader[Any]):
    """An `IterableLoader` yields one replica's batches.

    Of the latest global batch, `own` is the replica's number of samples, and `total` that of all replicas. If `own` is
    0, the batch has one sample that does not count: a replica without samples must also take the step.

    A dataset that shuffles with the global generators (torch, Python, NumPy) draws the same numbers on all replicas,
    derived from `seed` and the epoch. The model's random numbers are unaffected. Without `set_epoch`, each iteration is
    the next epoch.

    Cost: each replica reads the whole dataset and drops other replicas' samples, in the DataLoader's workers. Each
    epoch starts new workers, even with `persistent_workers`: running workers would not receive the epoch. Without
    workers, each batch costs some tens of microseconds for the random numbers.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        global_batch_size: int,
        *,
        replica: int,
        num_replicas: int,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any],
        seed: int = 0,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        self.seed = seed if generator is None else generator.initial_seed()
        self.epoch = 0
        self.global_batch_size = global_batch_size
        self.own = self.total = 0
        self.on_batch: Callable[[IterableLoader | None], None] = lambda loader: None  # called with None at the end
        parts = _Parts(dataset, global_batch_size, drop_last, collate_fn)
        super().__init__(parts, batch_size=None, collate_fn=_as_it_is, generator=torch.Generator(), **options)
        self.regroup(num_replicas, replica)

    @property
    def source(self) -> Any:
        return self._parts.source

    @property
    def _parts(self) -> _Parts:
        assert isinstance(self.dataset, _Parts)
        return self.dataset

    def regroup(self, num_replicas: int, replica: int) -> None:
        """Divide batches among another number of replicas from the next iteration on; global batches do not change."""
        self._parts.num_replicas, self._parts.replica = num_replicas, replica

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which seeds the dataset's draws. All replicas set the same epoch."""
        self.epoch = epoch

    @property
    def weight(self) -> float:
        """Return the latest batch's weight in a mean over replicas: 1 if all replicas have equally many samples."""
        return self.own * self._parts.num_replicas / self.total

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        try:
            for own, total, batch in self._read():
                self.own, self.total = own, total
                self.on_batch(self)
                yield batch
        finally:
            self.on_batch(None)

    def _read(self) -> Iterator[tuple[int, int, Any]]:
        seed = epoch_seed(self.seed, self.epoch)
        self.epoch += 1
        self.generator.manual_seed(seed)  # seeds the workers
        self._iterator = None
        begin = super().__iter__
        return begin() if self.num_workers else RandomStream(seed).iterate(begin)


class _Parts(IterableDataset[Any]):
    def __init__(
        self, source: IterableDataset[Any], batch_size: int, drop_last: bool, collate_fn: Callable[[list[Any]], Any]
    ) -> None:
        self.source = source
        self.num_replicas, self.replica = 1, 0
        self._batch_size, self._drop_last, self._collate_fn = batch_size, drop_last, collate_fn

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        together: list[Any] = []
        for sample in self.source:
            together.append(sample)
            if len(together) == self._batch_size:
                yield self._own_part(together)
                together = []
        if together and not self._drop_last:
            yield self._own_part(together)

    def _own_part(self, together: list[Any]) -> tuple[int, int, Any]:
        total = len(together)
        begin, end = (total * one // self.num_replicas for one in (self.replica, self.replica + 1))
        own = together[begin:end]
        return len(own), total, self._collate_fn(own or together[:1])


def _as_it_is(item: Any) -> Any:
    return item


def explain_own_division(dataset: Any) -> str:
    """Describe how a dataset already divides itself among ranks, or return "" if it does not."""
    if getattr(dataset, "__dict__", {}).get("_distributed") is not None:
        return "datasets.distributed.split_dataset_by_node has given each rank its part already"
    if any(getattr(stage, "__name__", "") == "split_by_node" for stage in getattr(dataset, "pipeline", None) or ()):
        return "webdataset's split_by_node gives each rank its part already"
    return ""
