"""A fit that goes on inside an epoch trains on the rest of that epoch's order, whatever has drawn the order."""

from __future__ import annotations

import random

import pytest
import torch
from tests.shuffling import Shuffled, as_sample, seed_globals
from tests.training import copy_parameters
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

import phalanx
from phalanx import strategies
from phalanx.testing import run_ranks

SIZE, BATCH, EPOCHS = 22, 4, 2
UPDATES = EPOCHS * -(-SIZE // BATCH)
TABLE = [as_sample(number) for number in range(SIZE)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Kept(IterableDataset):
    """A dataset that shuffles by a generator of its own, whose state lasts from epoch to epoch."""

    def __init__(self, seed: int) -> None:
        self.generator = generator(seed)

    def __iter__(self):
        return map(as_sample, torch.randperm(SIZE, generator=self.generator).tolist())


OWN = {  # loaders that a function makes, for a replica
    "shuffle": lambda r: DataLoader(TABLE, BATCH, shuffle=True),
    "shuffle by a generator": lambda r: DataLoader(TABLE, BATCH, shuffle=True, generator=generator(7 + r)),
    "weighted": lambda r: DataLoader(TABLE, BATCH, sampler=WeightedRandomSampler(torch.ones(SIZE), SIZE)),
    "weighted by a generator": lambda r: DataLoader(
        TABLE, BATCH, sampler=WeightedRandomSampler(torch.ones(SIZE), SIZE, generator=generator(r))
    ),
    "sampler with a generator": lambda r: DataLoader(
        TABLE, BATCH, sampler=RandomSampler(TABLE, generator=generator(r))
    ),
    "buffer": lambda r: DataLoader(Shuffled(SIZE, "numpy", 5), BATCH),
    "dataset with a generator": lambda r: DataLoader(Kept(r), BATCH),
    "workers": lambda r: DataLoader(Shuffled(SIZE, "python"), BATCH, num_workers=1, persistent_workers=True),
    "no loader": lambda r: Batches(),
}
DIVIDED = {
    "divided": lambda: DataLoader(Shuffled(SIZE, "torch"), BATCH),
    "divided, buffer": lambda: DataLoader(Shuffled(SIZE, "python", 6), BATCH),
    "divided, with a generator": lambda: DataLoader(Kept(3), BATCH),
    "divided, workers": lambda: DataLoader(Shuffled(SIZE, "numpy"), BATCH, num_workers=1, persistent_workers=True),
}


class Batches:
    """Something that can be iterated, and is no DataLoader."""

    def __iter__(self):
        return iter(torch.randperm(SIZE).float().reshape(-1, 1).split(BATCH))


class Recorder(nn.Module):
    """A model that draws random numbers, and keeps the samples that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.seen: list[float] = []

    def training_step(self, batch):
        self.seen += batch[:, 0].tolist()
        random.random()
        return self.layers(batch / SIZE).square().mean()


def fit(kind, strategy, folder=None, *, most=None, seed=5):
    seed_globals(seed + 10 * strategy.replica_id_in_sync_group)
    model = Recorder()
    trainer = phalanx.Trainer(
        model, lambda p: torch.optim.SGD(p, lr=0.1), strategy=strategy, max_epochs=EPOCHS, max_steps=most,
        checkpoint=folder, save_every=None if folder is None else 1, show_progress=False,
    )  # fmt: skip
    trainer.fit((lambda context: OWN[kind](context.input_pipeline_id)) if kind in OWN else DIVIDED[kind]())
    return model.seen, copy_parameters(trainer.strategy.bare_model)


@pytest.mark.slow(but=("shuffle",))
@pytest.mark.parametrize("kind", [*OWN, *DIVIDED])
def test_a_fit_that_ended_anywhere_goes_on_with_the_rest_of_its_order(kind, tmp_path):
    """The loader drew another order, from the random state in the middle of the epoch: of the samples that were left
    some came again, and others never.
    """
    whole, expected = fit(kind, strategies.SingleDeviceStrategy("cpu"))
    epochs = whole[:SIZE], whole[SIZE:]
    assert epochs[0] != epochs[1]
    if "weighted" not in kind:
        assert [sorted(one) for one in epochs] == [[*map(float, range(SIZE))]] * 2
    at = random.Random(kind).sample(range(1, UPDATES), 2)
    for most in at:
        folder = tmp_path / str(most)
        before, _ = fit(kind, strategies.SingleDeviceStrategy("cpu"), folder, most=most)
        after, found = fit(kind, strategies.SingleDeviceStrategy("cpu"), folder, seed=99)
        assert before + after == whole, most
        assert all(map(torch.equal, found, expected)), most


def _fit(rank, world_size, kind, folder, stops):
    found = []
    for most in stops:
        with strategies.get("mirrored", launch=False) as strategy:
            found.append(fit(kind, strategy, folder, most=most))
    return found


@pytest.mark.slow(but=("divided, buffer",))
@pytest.mark.parametrize("kind", [*OWN, *DIVIDED])
def test_so_does_one_of_several_ranks(kind, tmp_path):
    """A generator that each replica had seeded otherwise was seeded alike on all: they trained on the same samples."""
    whole = run_ranks(_fit, 2, kind, None, [None])
    most = random.Random(kind).randrange(1, UPDATES)
    cut = run_ranks(_fit, 2, kind, tmp_path, [most, None])
    for [(seen, expected)], [(before, _), (after, found)] in zip(whole, cut, strict=True):
        assert before + after == seen
        assert all(map(torch.equal, found, expected))
    first, second = (one[0][0] for one in whole)
    assert first != second
    if kind in DIVIDED:
        own = [of[: len(of) // 2] for of in (first, second)]
        assert set(own[0]) | set(own[1]) == set(map(float, range(SIZE)))


def test_the_seeds_of_the_script_say_the_order():
    """They said nothing: whatever the seed of a loader's generator, each epoch had the one order that its number
    gave."""

    def order(seed, of_generator):
        seed_globals(seed)
        model = Recorder()
        trainer = phalanx.Trainer(
            model, lambda p: torch.optim.SGD(p, lr=0.1), strategy=strategies.SingleDeviceStrategy("cpu"),
            show_progress=False,
        )  # fmt: skip
        given = None if of_generator is None else generator(of_generator)
        trainer.fit(lambda context: DataLoader(TABLE, BATCH, shuffle=True, generator=given))
        return tuple(model.seen)

    assert order(1, None) == order(1, None) != order(2, None)
    assert order(1, 3) == order(2, 3) != order(1, 4)


def test_a_generator_that_two_fits_use_goes_on_as_in_one():
    def orders(*until):
        seed_globals(3)
        model, shared = Recorder(), generator(8)
        trainer = phalanx.Trainer(
            model, lambda p: torch.optim.SGD(p, lr=0.1), strategy=strategies.SingleDeviceStrategy("cpu"),
            show_progress=False,
        )  # fmt: skip
        for trainer.max_epochs in until:
            trainer.fit(lambda context: DataLoader(TABLE, BATCH, shuffle=True, generator=shared))
        return model.seen

    assert orders(3) == orders(1, 3) == orders(1, 2, 3)
