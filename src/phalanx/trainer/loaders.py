"""Divide the data of `Trainer.fit` among the replicas, and weight the batches by their samples.

DataLoader over a dataset with a length     the strategy divides it; its sampler records the job's position
DataLoader over an IterableDataset          each replica reads it and takes its part of each batch; the position is a
                                            number of batches, which a resumed run reads and skips
a dict of DataLoaders                       every step gets a dict with a batch of each
a function of `InputContext`                returns each replica's own batches; the ranks check in each step that all of
                                            them have one
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from phalanx._base.log import get_logger
from phalanx.data import DistributedSampler
from phalanx.data.combined_dataset import CombinedDataset, CombinedMember
from phalanx.data.random_stream import RandomStream, epoch_seed
from phalanx.elastic import generator_states
from phalanx.errors import PhalanxError
from phalanx.strategies import Strategy
from phalanx.strategies.iterable_loader import IterableLoader
from phalanx.strategies.loader import options_of, why_empty
from phalanx.trainer.data_seeds import seed_generators, seed_of_replica
from phalanx.trainer.metrics import num_samples, num_samples_or_one

_logger = get_logger(__name__)

Loaders = Any
"""A DataLoader, a dict of them, or a function of an InputContext."""


class FitLoader:
    """`FitLoader` yields the batches of this replica, with their weights in an update."""

    def __init__(self, loader: Any, strategy: Strategy, *, is_own: bool = False) -> None:
        self.loader, self._strategy = loader, strategy
        self.is_own = is_own
        """Whether a function of the script made the loader. If so, replicas may have different numbers of batches."""
        sampler = getattr(loader, "sampler", None)
        self.sampler = sampler if isinstance(sampler, DistributedSampler) and not is_own else None
        self._stream: RandomStream | None = None
        self._num_skipped = 0  # skipped batches that the progress line has yet to count

    @property
    def total(self) -> int | None:
        """Return the number of batches left in the epoch; None if unknown."""
        return len(self.loader) if self.sampler is not None else None

    @property
    def batch_size(self) -> int | None:
        """Return the number of samples in each batch of this replica; None if it may vary."""
        return self.loader.batch_size if self.sampler is not None else None

    def samples_shown(self, batch: Any) -> float:
        """Return the number of samples in all replicas' batches of this step, divided by the number of ranks.

        The progress line multiplies it by that number again.
        """
        if self._num_skipped:
            self._num_skipped -= 1
            return 0.0
        world_size = dist.get_world_size() if dist.is_initialized() else 1  # several ranks may share a batch
        if isinstance(self.loader, IterableLoader):
            return self.loader.total / world_size
        is_several = isinstance(getattr(self.loader, "dataset", None), CombinedDataset)
        count = max(num_samples_or_one(one) for one in (batch.values() if is_several else (batch,)))
        return count * self._strategy.num_replicas_in_sync / world_size

    def begin_epoch(self, epoch: int, batch_size: int | None, seeds: tuple[int, ...]) -> None:
        """Prepare the data for an epoch, or for the rest of one. `seeds` are the seeds of all replicas."""
        loader = self.loader
        if self.sampler is not None:
            # A rank that joined later divided the batch by a larger number of replicas: use the first ranks' size.
            if loader.batch_sampler is not None:  # otherwise each sample is a batch
                loader.batch_sampler.batch_size = batch_size
        elif isinstance(loader, IterableLoader):
            loader.regroup(self._strategy.num_replicas_in_sync, self._strategy.replica_id_in_sync_group)
        if self.sampler is not None and isinstance(loader, DataLoader):
            # otherwise it would draw its seed from the model's generator, once more if the epoch is resumed
            if loader.generator is None:
                loader.generator = torch.Generator()
            loader.generator.manual_seed(epoch_seed(self.sampler.seed, epoch))
        if self.sampler is None:
            self._begin_order(epoch)
            _set_epoch(loader, epoch)
        if self.is_own and not isinstance(loader, (list, tuple)):
            own = seed_of_replica(seeds, self._strategy.replica_id_in_sync_group)
            self._stream = RandomStream(epoch_seed(own, epoch))

    def _begin_order(self, epoch: int) -> None:
        """Seed the draws of the loader's own generators and of its workers from the epoch."""
        if isinstance(self.loader, DataLoader):
            seed_generators(self.loader, epoch)
            if self.loader.persistent_workers:  # they have drawn in earlier epochs; a resumed run's have not
                self.loader._iterator = None

    def batches(self, shown: Iterable[Any], accumulate: int, skip: int) -> Iterator[tuple[Any, float, bool, int]]:
        """Yield (batch, its share of its update's samples, whether it is the update's last, batches so far).

        `shown` is the iterable over the loader; the first `skip` batches of the epoch are read and skipped.
        """
        if self.sampler is not None:
            return self._counted_batches(shown, accumulate)
        iterator = iter(shown) if self._stream is None else self._stream.iterate(lambda: iter(shown))
        return self._grouped_batches(iterator, accumulate, skip)

    def _counted_batches(self, shown: Iterable[Any], accumulate: int) -> Iterator[tuple[Any, float, bool, int]]:
        sizes = BatchSizes.of(self.loader)
        for number, batch in enumerate(shown):
            begin = number // accumulate * accumulate
            group = range(begin, min(begin + accumulate, sizes.total))
            yield batch, sizes.share(number, group), number == group[-1], number + 1

    def _grouped_batches(
        self, iterator: Iterator[Any], accumulate: int, skip: int
    ) -> Iterator[tuple[Any, float, bool, int]]:
        number = self._skip(iterator, skip)
        while True:
            group = [(batch, *self._weigh(batch)) for batch in itertools.islice(iterator, accumulate)]
            if not self._all_have_batch(bool(group)):
                return
            total = sum(one[2] for one in group)
            for place, (batch, own, _) in enumerate(group, start=1):
                number += 1
                yield batch, own / total, place == len(group), number

    def _skip(self, iterator: Iterator[Any], count: int) -> int:
        """Skip `count` batches without advancing the random states: the resumed ones include these batches' draws."""
        self._num_skipped = count
        if not count:
            return 0
        states = generator_states.GeneratorStates().capture()
        skipped = sum(1 for _ in itertools.islice(iterator, count))
        generator_states.restore(states)
        return skipped

    def _weigh(self, batch: Any) -> tuple[float, float]:
        """Return what a batch adds to the numerator and to the denominator of its share of an update."""
        if isinstance(self.loader, IterableLoader):
            return self.loader.own * self._strategy.num_replicas_in_sync, self.loader.total
        count = num_samples(batch)
        return count, count

    def _all_have_batch(self, has: bool) -> bool:
        """Return whether all replicas have a batch; the first replica without one ends the epoch for all."""
        group = self._strategy.training_group
        if not self.is_own or group is None:
            return has
        agreed = torch.tensor(int(has), device=self._strategy.device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
        if has and not agreed:
            _logger.warning(
                "Trainer: another rank has no more batches, so the epoch ends here, and the rest of this rank's loader "
                "is skipped. Let the function return equally many batches for all replicas."
            )
        return bool(agreed)

    # -- validation ----------------------------------------------------------------------------------------------------

    def validation_batches(self, most: int | None) -> Iterator[tuple[Any, bool]]:
        """Yield (batch, whether it counts), at most `most`; if ranks evaluate together, fillers may follow."""
        together = self._strategy.evaluates_together and self._strategy.training_group is not None
        if self.sampler is not None:
            mine = len(self.loader) if most is None else min(len(self.loader), most)
            of_all = self._most_of_all(mine) if together else mine
            for batch in itertools.islice(self.loader, mine):
                yield batch, True
            for _ in range(of_all - mine):
                yield self._any_batch(), False
            return
        self._begin_order(0)  # the same order in each validation, even on a rank that has just joined
        if isinstance(self.loader, IterableLoader):
            self.loader.set_epoch(0)
        iterator, last = itertools.islice(self.loader, most), None
        while True:
            batch = next(iterator, _NONE)
            has = batch is not _NONE
            if not (self._most_of_all(int(has)) if together and self.is_own else has):
                return
            last = batch if has else self._any_batch() if last is None else last
            yield last, has and not (isinstance(self.loader, IterableLoader) and self.loader.own == 0)

    def _most_of_all(self, mine: int) -> int:
        agreed = torch.tensor(mine, device=self._strategy.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._strategy.training_group)
        return int(agreed)

    def _any_batch(self) -> Any:
        """Return a batch that does not count, for a rank that has none left."""
        if self.sampler is None:
            raise PhalanxError(
                "Trainer.validate: all ranks of this strategy evaluate together, and this rank's loader has no batch: "
                "let the function return at least one for each replica"
            )
        return self.loader.collate_fn([self.loader.dataset[0]])


_NONE = object()


def divide(strategy: Strategy, name: str, given: Any, *, padding: bool = True) -> FitLoader:
    """Divide `given` among the replicas; return the `FitLoader` of this replica.

    Raises:
        ValueError, TypeError: `given` is not a loader, cannot be divided, or has no batch.
    """
    if isinstance(given, FitLoader):
        return given
    if isinstance(given, Mapping):
        return _divide_together(strategy, name, given)
    if isinstance(given, DataLoader):
        divided = strategy.distribute(given, padding=padding)
        if not isinstance(divided, IterableLoader) and (why := why_empty(divided)):
            raise ValueError(f"Trainer: {name} has no batch: {why}")
        return FitLoader(divided, strategy)
    if callable(given) and not isinstance(given, Sized):
        return FitLoader(_call(strategy, name, given), strategy, is_own=True)
    raise TypeError(
        f"Trainer: {name} must be a torch.utils.data.DataLoader, a dict of them, or a function of an InputContext that "
        f"returns this replica's batches; got a {type(given).__name__}"
    )


def _call(strategy: Strategy, name: str, function: Callable[[Any], Any]) -> Any:
    made = strategy.distribute_datasets_from_function(function)
    if not hasattr(made, "__iter__") or hasattr(made, "__next__"):
        raise TypeError(
            f"Trainer: the function of {name} must return an iterable for all epochs, such as a DataLoader, "
            f"got a {type(made).__name__}"
        )
    return made


def _divide_together(strategy: Strategy, name: str, given: Mapping[Any, Any]) -> FitLoader:
    members: dict[str, CombinedMember] = {}
    options: dict[str, Any] = {"num_workers": 0}
    for key, loader in given.items():
        place = f"{name}[{key!r}]"
        if not isinstance(key, str) or not isinstance(loader, DataLoader):
            raise TypeError(
                f"Trainer: {place} must be a torch.utils.data.DataLoader by name, got a {type(loader).__name__}"
            )
        if isinstance(loader.dataset, IterableDataset):
            raise TypeError(
                f"Trainer: {place} is over an IterableDataset: several loaders are read together by index. Make one "
                "dataset whose samples contain the data of all loaders"
            )
        found = options_of(loader)
        if found is None:
            raise TypeError(
                f"Trainer: {place} is already divided, but several loaders are divided together: give it undivided"
            )
        if len(loader.dataset) == 0:  # type: ignore[arg-type]
            raise ValueError(f"Trainer: {place} has no batch: its dataset is empty")
        members[key] = CombinedMember(
            loader.dataset, found["batch_size"], found["shuffle"], 0, loader.collate_fn, found["drop_last"]
        )
        if found["num_workers"] > options["num_workers"]:
            options = {key: found[key] for key in _OF_WORKERS if key in found}
    if not members:
        raise ValueError(f"Trainer: {name} is an empty dict: give it loaders by name")
    together = CombinedDataset(members)
    replicas = strategy.num_replicas_in_sync
    uneven = [f"{key}: {one.batch_size}" for key, one in members.items() if one.batch_size % replicas]
    if uneven:
        raise ValueError(
            f"Trainer: {name}: batch sizes are for all {replicas} replicas together, which can't share these "
            f"evenly: {', '.join(uneven)}"
        )
    if not len(together):
        sizes = ", ".join(
            f"{key}: {len(one.dataset)} samples, {one.batch_size} in a batch" for key, one in members.items()
        )
        raise ValueError(
            f"Trainer: {name} has no batch: none of its datasets has a full one ({sizes}), and drop_last=True drops "
            "the others: make the batches smaller, or leave drop_last out"
        )
    # The last step is complete here, but may not be after resuming with another number of ranks.
    options["drop_last"] = together.drop_last
    loader = strategy.loader(together, together.units_per_step, shuffle=False, collate_fn=together.collate, **options)
    return FitLoader(loader, strategy)


_OF_WORKERS = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
               "persistent_workers", "prefetch_factor")  # fmt: skip


def _set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` on the loader, its sampler and its dataset, where they have it."""
    source = loader.source if isinstance(loader, IterableLoader) else getattr(loader, "dataset", None)
    for one in (getattr(loader, "sampler", None), source, loader):
        set_epoch = getattr(one, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


@dataclass(frozen=True)
class BatchSizes:
    """`BatchSizes` describes `total` batches: all have `full` samples except the last, which has `last`."""

    total: int
    full: int
    last: int

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> BatchSizes:
        """Return the sizes for the rest of the epoch; 1 for each if batches are equal, or are samples themselves."""
        total = len(loader)
        batch_size = getattr(loader.batch_sampler, "batch_size", None)
        if batch_size is None or loader.batch_sampler.drop_last or not total:  # type: ignore[union-attr]
            return cls(total, 1, 1)
        return cls(total, batch_size, len(cast("Sized", loader.sampler)) - (total - 1) * batch_size)

    def share(self, number: int, group: range) -> float:
        """Return the share that batch `number` has of the samples of `group`, a range of batches that contains it."""
        together = self.full * len(group) - (self.full - self.last) * (self.total - 1 in group)
        return (self.last if number == self.total - 1 else self.full) / together
