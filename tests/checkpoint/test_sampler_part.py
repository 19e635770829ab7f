"""A sampler among the parts of a checkpoint goes on behind the last batch that the loop got, whatever the loader is.

With two workers, 32 of 64 samples were lost: the workers had taken their indices ahead of the loop.
"""

import itertools

import pytest
import torch
from tests.on_ranks import on_ranks
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import phalanx
from phalanx.checkpoint import RandomState
from phalanx.testing import run_ranks

DATA = TensorDataset(torch.arange(64))


class Unsaid:
    """Batches of a size that nobody knows."""

    def __init__(self, sampler):
        self._batches = BatchSampler(sampler, 4, False)

    def __iter__(self):
        return iter(self._batches)

    def __len__(self):
        return len(self._batches)


def _loader(sampler, workers, batch_size, drop_last, persistent):
    more = {"persistent_workers": True} if persistent and workers else {}
    return DataLoader(DATA, batch_size, sampler=sampler, num_workers=workers, drop_last=drop_last, **more)


def _samples(batch):
    return batch[0].reshape(-1).tolist()


def _stop_and_go_on(rank, world_size, folder, case):
    workers, batch_size, steps, drop_last, persistent, breaks, epochs = case
    manager = phalanx.CheckpointManager(folder)
    seen = []
    sampler = phalanx.DistributedSampler(DATA, seed=7)
    loader = _loader(sampler, workers, batch_size, drop_last, persistent)
    for _ in range(epochs - 1):
        for _ in loader:
            pass
    for step, batch in enumerate(loader, 1):
        seen += _samples(batch)
        if step == steps:
            if not breaks:
                manager.save(step, {"sampler": sampler, "random": RandomState()})
            break
    if breaks:
        manager.save(steps, {"sampler": sampler, "random": RandomState()})
    again = phalanx.DistributedSampler(DATA, seed=7)
    parts = {"sampler": again, "random": RandomState()}
    assert manager.load(parts) is not None
    rest = [
        sample for batch in _loader(again, workers, batch_size, drop_last, persistent) for sample in _samples(batch)
    ]
    manager.close()
    return seen, rest, again.epoch


CASES = [
    # workers, batch size, steps, drop_last, persistent workers, whether the save is behind the loop, the epoch
    *itertools.product((0, 2), (4,), (1, 5), (False,), (False, True), (False, True), (1, 2)),
    (2, 5, 3, True, False, False, 1),
    (2, 5, 3, True, False, True, 1),
    (2, None, 9, False, False, False, 1),
    (1, 7, 2, False, False, True, 1),
]


# Workers of a DataLoader are processes: all cases take seconds.
@pytest.mark.slow(but=("2-cases0",))
@pytest.mark.parametrize(("world_size", "cases"), [(2, [CASES[0], *CASES[-4:]]), (1, CASES), (2, CASES)])
def test_no_sample_is_lost_and_none_comes_twice(tmp_path, world_size, cases):
    ended = run_ranks(_all_cases, world_size, str(tmp_path), cases)
    for number, case in enumerate(cases):
        *_, drop_last, _, _, _ = case
        found = [sample for rank in ended for sample in (*rank[number][0], *rank[number][1])]
        assert len(set(found)) == len(found), case
        assert len(found) == 64 if not drop_last else len(found) > 64 - 5 * world_size - 5, case


def _all_cases(rank, world_size, folder, cases):
    return [_stop_and_go_on(rank, world_size, f"{folder}/{number}", case) for number, case in enumerate(cases)]


@pytest.mark.parametrize("workers", [0, 2])
@on_ranks(1)
def test_the_end_of_an_epoch_is_the_beginning_of_the_next(tmp_path, workers):
    manager = phalanx.CheckpointManager(tmp_path)
    sampler = phalanx.DistributedSampler(DATA)
    for _ in DataLoader(DATA, 5, sampler=sampler, num_workers=workers, drop_last=True):
        pass
    manager.save(1, {"sampler": sampler})
    manager.close()
    assert (manager.load().state["sampler"]["epoch"], manager.load().state["sampler"]["consumed"]) == (1, 0)


@on_ranks(1)
def test_batches_of_an_unknown_size_are_refused_with_advice(world_size, tmp_path):
    manager = phalanx.CheckpointManager(tmp_path)
    sampler = phalanx.DistributedSampler(DATA)
    loader = DataLoader(DATA, batch_sampler=Unsaid(sampler), num_workers=2)
    next(iter(loader))
    with pytest.raises(phalanx.CheckpointError, match=r"workers of DataLoader have read indices ahead.*consumed="):
        manager.save(1, {"sampler": sampler})
    manager.save(1, {"sampler": sampler.state_dict(consumed=4)})
    assert manager.load().state["sampler"]["consumed"] == 4 * world_size
