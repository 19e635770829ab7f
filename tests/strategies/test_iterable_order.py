"""A dataset that can only be iterated, and shuffles itself, is divided into parts that have every sample once."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from tests.shuffling import DRAWS, Shuffled, seed_globals
from torch import nn
from torch.utils.data import DataLoader

import phalanx
from phalanx import strategies
from phalanx.testing import run_ranks

CASES = [(23, "torch", 0, 0), (24, "python", 0, 0), (9, "numpy", 4, 0), (24, "torch", 5, 1), (13, "python", 3, 2)]
"""The size, from what the order is drawn, the size of the buffer, and the number of workers."""


def _read(rank, world_size, case):
    size, draws, buffer, workers = case
    seed_globals(rank)  # as Trainer(seed=0) does
    with strategies.get("mirrored", launch=False) as strategy:
        loader = strategy.distribute(
            DataLoader(Shuffled(size, draws, buffer), 6, num_workers=workers, persistent_workers=workers > 1)
        )
        epochs = []
        for _ in range(2):
            own = []
            for batch in loader:
                own += batch[: loader.own, 0].tolist()
                torch.rand(1 + rank)  # as dropout does
            epochs.append(own)
        return epochs


@pytest.mark.slow(but=(2,))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parts_of_a_shuffled_dataset_have_every_sample_once_whatever_each_rank_has_drawn(world_size):
    """Each replica went through a permutation of its own and took its part of that: of 24 samples 7 were lost and 7
    came twice, and nothing said so."""
    for case in CASES:
        copies = max(case[3], 1)  # each of several workers gives all, as this dataset does not divide itself
        parts = run_ranks(_read, world_size, case)
        for epoch in range(2):
            together = sorted(itertools.chain(*(part[epoch] for part in parts)))
            assert together == sorted([*range(case[0])] * copies), case
        assert parts[0][0] != parts[0][1], case


@pytest.mark.parametrize("draws", DRAWS)
def test_what_the_model_draws_is_what_it_would_draw_without_the_dataset(draws):
    with strategies.SingleDeviceStrategy("cpu") as strategy:
        loader, drawn = strategy.loader(Shuffled(12, draws, buffer=3), 2), []
        seed_globals(5)
        for _ in loader:
            drawn.append(_draw())
    seed_globals(5)
    assert drawn == [_draw() for _ in drawn]


def _draw():
    return torch.rand(1).item(), random.random(), np.random.rand()


def test_a_seed_and_an_epoch_say_the_order():
    def read(seed, epoch=None):
        with strategies.SingleDeviceStrategy("cpu") as strategy:
            loader = strategy.loader(Shuffled(20), 4, seed=seed)
            if epoch is not None:
                loader.set_epoch(epoch)
            return torch.cat(list(loader)).flatten().tolist()

    assert read(3) == read(3) == read(3, 0)
    assert len({tuple(read(seed, epoch)) for seed in (3, 4) for epoch in (0, 1)}) == 4


class Recorder(nn.Linear):
    """A model that keeps what it was validated with."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.seen: list[float] = []

    def training_step(self, batch):
        return self(batch).square().mean()

    def validation_step(self, batch):
        self.seen += batch[:, 0].tolist()
        return {"sum": batch[:, 0]}


def _validate(rank, world_size, size):
    with strategies.get("mirrored", launch=False) as strategy:
        model = Recorder()
        trainer = phalanx.Trainer(
            model, lambda p: torch.optim.SGD(p, lr=1e-4), strategy=strategy, seed=0, show_progress=False
        )
        loader = DataLoader(Shuffled(size, "python"), 3 * world_size)
        return [trainer.validate(loader)["sum"] for _ in range(2)], model.seen


@pytest.mark.parametrize("size", [12, 18])
def test_a_validation_over_a_shuffled_dataset_counts_each_sample_once(size):
    found = run_ranks(_validate, 2, size)
    for metrics, _ in found:
        assert metrics == pytest.approx([sum(range(size)) / size] * 2)
    together = sorted(itertools.chain(*(seen for _, seen in found)))
    assert together == sorted([*range(size)] * 2)
