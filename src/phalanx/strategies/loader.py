"""Divide the global batch among the replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from phalanx.data import DistributedSampler
from phalanx.strategies.iterable_loader import IterableLoader, explain_own_division

# Modules of the samplers that torch.utils.data.DataLoader and torchdata's StatefulDataLoader create.
_MODULES = ("torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler")
_OWN = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}


@dataclass(frozen=True)
class InputContext:
    """An `InputContext` tells the function of `distribute_datasets_from_function` which replica it is called for."""

    num_replicas_in_sync: int
    input_pipeline_id: int
    """The index of this replica."""

    @property
    def num_input_pipelines(self) -> int:
        """Return the number of replicas."""
        return self.num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return each replica's number of samples in a global batch.

        Raises:
            ValueError: the replicas can't share the batch evenly.
        """
        return divide_batch(global_batch_size, self.num_replicas_in_sync)


def divide_batch(batch_size: int, num_replicas: int) -> int:
    """Return each replica's number of samples in a batch of `batch_size` samples.

    Raises:
        ValueError: the replicas can't share the batch evenly; the message names the nearest sizes that they can share.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a number of samples, 1 or more, got {batch_size!r}")
    own, rest = divmod(batch_size, num_replicas)
    if rest:
        nearest = f"{own * num_replicas} or {(own + 1) * num_replicas}" if own else f"{num_replicas}"
        raise ValueError(
            f"batch_size {batch_size} is for all replicas together, and {num_replicas} replicas can't share it evenly: "
            f"use {nearest}"
        )
    return own


def make_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    num_replicas: int,
    replica: int,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    padding: bool,
    options: Mapping[str, Any],
) -> DataLoader[Any]:
    """Return a DataLoader over the samples of one replica.

    Raises:
        TypeError: `dataset` has no length.
    """
    sampler = DistributedSampler(dataset, num_replicas, replica, shuffle, seed, drop_last, padding=padding or drop_last)
    # A separate generator: a DataLoader draws a number when an epoch begins, which must not change the model's draws.
    generator = torch.Generator()
    generator.manual_seed(seed)
    return DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last, **{"generator": generator, **options})


def check_loader(dataset: Any, options: Mapping[str, Any]) -> None:
    """Refuse arguments that `Strategy.loader` cannot use.

    Raises:
        TypeError: `dataset` is a loader, or an option sets a value that the strategy decides.
    """
    if clash := sorted(_OWN & options.keys()):
        raise TypeError(f"loader: {', '.join(clash)}: the strategy divides the batch itself")
    if isinstance(dataset, DataLoader):
        raise TypeError("loader: expected a dataset, got a DataLoader: use strategy.distribute(loader)")


def make_iterable_loader(
    dataset: IterableDataset[Any],
    global_batch_size: int,
    num_replicas: int,
    replica: int,
    drop_last: bool,
    options: Mapping[str, Any],
    *,
    seed: int = 0,
) -> IterableLoader:
    """Return the loader of one replica over an iterable dataset.

    Raises:
        TypeError: the dataset divides itself among ranks.
    """
    if how := explain_own_division(dataset):
        raise TypeError(
            f"loader: {how}, and the strategy also divides each batch: samples would be lost. Pass the undivided "
            "dataset, or make each replica's own loader in a function: trainer.fit(function), "
            "strategy.distribute_datasets_from_function(function)"
        )
    return IterableLoader(
        dataset,
        global_batch_size,
        replica=replica,
        num_replicas=num_replicas,
        seed=seed,
        drop_last=drop_last,
        **{"collate_fn": default_collate, **options},
    )


def require_divided(loader: DataLoader[Any], place: tuple[int, int], *, padding: bool) -> None:
    """Refuse a loader whose sampler is not for `place` (number of replicas, index), or pads with `padding=False`.

    Raises:
        ValueError: the loader is refused; the message gives the reason.
    """
    sampler = loader.sampler
    assert isinstance(sampler, DistributedSampler)
    if (sampler.num_replicas, sampler.rank) != place:
        raise ValueError(
            f"the loader's sampler gives part {sampler.rank} of {sampler.num_replicas}, and this is replica {place[1]} "
            f"of {place[0]}: make the loader with strategy.loader(dataset, batch_size)"
        )
    if not padding and not sampler.drop_last and sampler.padding and sampler.length % place[0]:
        raise ValueError(
            f"the loader's sampler repeats samples, because {place[0]} replicas cannot share {sampler.length} evenly: "
            "for evaluation, make the loader with strategy.loader(dataset, batch_size, padding=False)"
        )


def why_empty(loader: DataLoader[Any]) -> str:
    """Return why no replica has a batch of the divided `loader`; empty if some replica has one."""
    sampler: Any = loader.sampler
    samples = -(-sampler.length // sampler.num_replicas)  # on the first replica, which has the most
    if sampler.drop_last:
        samples = sampler.length // sampler.num_replicas
    if samples >= ((loader.batch_size or 1) if loader.drop_last else 1):
        return ""
    dropped = ", of which the last is dropped where it is not full" * loader.drop_last
    return (
        f"{sampler.length} samples for {sampler.num_replicas} replicas, in batches of {loader.batch_size} on "
        f"each{dropped}"
    )


_ITERATES = {"__iter__", "_get_iterator"}


def options_of(loader: DataLoader[Any]) -> dict[str, Any] | None:
    """Return the arguments with which `Strategy.loader` can divide `loader`; None if it is divided already.

    Raises:
        ValueError, TypeError: the loader has a custom sampler or iterator, or no batch size.
    """
    if isinstance(loader.sampler, DistributedSampler) or isinstance(loader, IterableLoader):
        return None
    for kind in type(loader).__mro__:
        if not kind.__module__.startswith(("torch.utils.data.", "torchdata.")) and _ITERATES & vars(kind).keys():
            raise ValueError(
                f"a {type(loader).__name__} defines its own iterator, which a divided DataLoader would lose: "
                "make each replica's own loader in a function: trainer.fit(function)"
            )
    is_iterable = isinstance(loader.dataset, IterableDataset)
    if loader.batch_size is None or not (is_iterable or _is_plain(loader.batch_sampler, BatchSampler)):
        raise ValueError(
            "a DataLoader without batch_size, or with a batch_sampler, cannot be divided: use batch_size, or make each "
            "replica's own loader in a function: trainer.fit(function)"
        )
    if is_iterable:
        return {"drop_last": loader.drop_last, **_worker_options(loader)}
    other = getattr(loader.sampler, "replacement", False) or len(loader.sampler) != len(loader.dataset)  # type: ignore[arg-type]
    shuffles = _is_plain(loader.sampler, RandomSampler)
    if not (shuffles or _is_plain(loader.sampler, SequentialSampler)) or other:
        raise ValueError(
            f"the loader's sampler, a {type(loader.sampler).__name__}, cannot be divided among replicas; only those of "
            "shuffle=True and shuffle=False can. A phalanx.DistributedSampler is used as it is"
        )
    return {
        "shuffle": shuffles,
        "drop_last": loader.drop_last,
        **_worker_options(loader),
    }


def _is_plain(sampler: object, kind: type) -> bool:
    """Return whether `sampler` is exactly of the class `kind` that a DataLoader creates, not of a subclass."""
    return type(sampler).__name__ == kind.__name__ and type(sampler).__module__ in _MODULES


def _worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "batch_size": loader.batch_size,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "persistent_workers": loader.persistent_workers,
    }
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
    return options
