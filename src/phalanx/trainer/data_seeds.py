"""Seed the loader that a function of the script returns for one replica, from the script's seeds and the epoch.

Such a loader reports no position: a run that resumes in mid-epoch reads the loader again up to the same batch. The
samples are the same only if the loader draws the same random numbers.

    drawn from                               seeded in each epoch by
    the global generators                    the replica's `torch.initial_seed()` when the run began
    the loader's own `torch.Generator`       the seed that the script gave the generator
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from phalanx import elastic
from phalanx.checkpoint.peers import Peers
from phalanx.data.random_stream import epoch_seed
from phalanx.strategies import Strategy


def agree_on_seeds(state: elastic.State, strategy: Strategy) -> None:
    """Set `state.data_seeds`, one per replica, to equal values on all ranks: known ones if any. All ranks call it.

    A rank that joins receives the seeds with which the run began; checkpoints contain them, too.
    """
    mine = state.data_seeds, strategy.replica_id_in_sync_group, torch.initial_seed()
    group = strategy.training_group
    gathered = [mine] if group is None else Peers(group, what="Trainer.fit").all_gather(mine)
    known = [seeds for seeds, _, _ in gathered if seeds]
    by_replica = {replica: seed for _, replica, seed in reversed(gathered)}  # from the first rank of each replica
    state.data_seeds = tuple(known[0]) if known else tuple(by_replica[replica] for replica in sorted(by_replica))


def seed_of_replica(seeds: tuple[int, ...], replica: int) -> int:
    """Return the seed of a replica, which may have joined later.

    If the script has seeded all replicas equally, they may be dividing one common order, so a new replica gets the same
    seed.
    """
    if replica < len(seeds):
        return seeds[replica]
    return seeds[0] if len(set(seeds)) == 1 else epoch_seed(seeds[0], replica)


_given: weakref.WeakKeyDictionary[torch.Generator, tuple[int, int]] = weakref.WeakKeyDictionary()
"""The seed that the script gave each generator, and the seed that replaced it for an epoch."""


def seed_generators(loader: Any, epoch: int) -> None:
    """Seed the generators of a loader, its samplers and its dataset from their original seeds and the epoch.

    Replicas draw the same numbers if, and only if, the script has seeded their generators equally.
    """
    for generator in _generators_of(loader):
        now = generator.initial_seed()
        given, of_epoch = _given.get(generator, (now, now))
        if now != of_epoch:  # the script has reseeded it
            given = now
        seed = epoch_seed(given, epoch)
        _given[generator] = given, seed
        generator.manual_seed(seed)


def _generators_of(loader: Any) -> Iterator[torch.Generator]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    places = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "source", getattr(loader, "dataset", None)),
    )
    found = {
        id(value): value
        for place in places
        for value in getattr(place, "__dict__", {}).values()
        if isinstance(value, torch.Generator) and value is not torch.default_generator
    }
    yield from found.values()
