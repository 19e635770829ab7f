"""`Inputs` is what a strategy does to a training script's data: it divides each global batch among the replicas."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx._comm.backend.shared import rehearses
from phalanx.strategies.iterable_loader import IterableLoader
from phalanx.strategies.loader import (
    InputContext,
    check_loader,
    divide_batch,
    make_iterable_loader,
    make_loader,
    options_of,
    require_divided,
)
from phalanx.strategies.world import world

T = TypeVar("T")


class Inputs:
    """These are the methods of a `Strategy` that make and divide loaders."""

    _stream: IterableLoader | None = None  # it has given a batch last, and its iteration is not over

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Return how many replicas share a batch."""

    @property
    @abstractmethod
    def replica_id_in_sync_group(self) -> int:
        """Return which of them this process is, or is part of."""

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        padding: bool = True,
        **options: Any,
    ) -> DataLoader[Any]:
        """Return a DataLoader over this replica's part of each batch of `batch_size` samples.

        The k-th batches of all replicas together are the same samples under every strategy. Its sampler is a
        `phalanx.DistributedSampler`; an epoch that nobody sets advances by itself.

        Arguments:
            batch_size: samples of all replicas together.
            padding: repeat some samples where they don't divide; False for evaluation, where each counts once.
            options: of `torch.utils.data.DataLoader`: num_workers, collate_fn, ...

        An IterableDataset is read by each replica, which takes its part of each batch (`shuffle` and `padding` are the
        dataset's own business); the last batch may be divided unevenly. What it draws from the global generators
        follows from `seed` and the epoch, which `loader.set_epoch(e)` sets: all replicas read it in the same order.

        Raises:
            ValueError: the replicas can't share the batch evenly.
            TypeError: the dataset has no length and is no IterableDataset, or divides itself; or an option is the
                strategy's own.
        """
        check_loader(dataset, options)
        group = world()
        if isinstance(dataset, IterableDataset):
            place = self.num_replicas_in_sync, self.replica_id_in_sync_group
            made = make_iterable_loader(dataset, batch_size, *place, drop_last, options, seed=seed)
            made.on_batch = self._note_stream
            return made
        if group is not None and rehearses(group):
            # It comes to a job that has divided the batch among fewer: elastic.State gives it the others' share.
            own = max(1, batch_size // self.num_replicas_in_sync)
        else:
            own = divide_batch(batch_size, self.num_replicas_in_sync)
        return make_loader(
            dataset,
            own,
            num_replicas=self.num_replicas_in_sync,
            replica=self.replica_id_in_sync_group,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            padding=padding,
            options=options,
        )

    def distribute(self, loader: DataLoader[Any], *, padding: bool = True) -> DataLoader[Any]:
        """Return `loader`, whose batch is taken as the global one, divided among the replicas, as `loader()` does.

        A loader whose sampler is a `phalanx.DistributedSampler` of as many replicas has been divided: it is returned as
        it is.

        Raises:
            ValueError, TypeError: it has a sampler of its own, or one of other replicas, or no batch size.
        """
        options = options_of(loader)
        if options is None:
            place = self.num_replicas_in_sync, self.replica_id_in_sync_group
            if isinstance(loader, IterableLoader):
                loader.regroup(*place)
                loader.on_batch = self._note_stream
                return loader
            require_divided(loader, place, padding=padding)
            return loader
        return self.loader(loader.dataset, padding=padding, **options)

    def experimental_distribute_dataset(self, dataset: DataLoader[Any]) -> DataLoader[Any]:
        """Do what `distribute` does, by the name of tf.distribute."""
        return self.distribute(dataset)

    def distribute_datasets_from_function(self, dataset_fn: Callable[[InputContext], T]) -> T:
        """Return what `dataset_fn` makes for this replica, as it is: for samples that no index finds, as of a stream.

        It is called once, with an `InputContext` that says whose samples it shall give.
        """
        return dataset_fn(InputContext(self.num_replicas_in_sync, self.replica_id_in_sync_group))

    def _note_stream(self, loader: IterableLoader | None) -> None:
        self._stream = loader

    def _weigh(self, weight: float | None) -> float:
        if weight is not None:
            return weight
        return 1.0 if self._stream is None else self._stream.weight
