"""torchdata's StatefulDataLoader with our sampler, over streams and indexed data: its position is the sampler's."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from tests.data.streams import Shards

import phalanx

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

SHARDS = Shards((30, 17, 0, 25, 40), ("read on", "indexed", "skips", "indexed", "read on"))
LENGTH = sum(SHARDS.lengths)


def make_loader(kind: str, workers: int, *, ranks: int = 1, rank: int = 0, snapshot: int = 1) -> Any:
    data: Any = range(LENGTH) if kind == "indexed" else SHARDS.stream(window=8, block=8, interleave=2, readers=2)
    sampler = phalanx.DistributedSampler(data, ranks, rank, padding=False)
    return torchdata.StatefulDataLoader(
        data, batch_size=4, sampler=sampler, num_workers=workers, collate_fn=list, snapshot_every_n_steps=snapshot
    )


def flat(batches: Any) -> list[int]:
    return [sample for batch in batches for sample in batch]


@pytest.mark.slow(but=("1-2-stream", "4-0-indexed"))
@pytest.mark.parametrize("kind", ["indexed", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("snapshot", [1, 4])
def test_a_saved_loader_goes_on_in_the_middle_of_an_epoch(kind, workers, snapshot):
    undisturbed = make_loader(kind, workers)
    epochs = [flat(undisturbed), flat(undisturbed)]
    loader = make_loader(kind, workers, snapshot=snapshot)
    iterator, got = iter(loader), []
    for _ in range(11):
        got += next(iterator)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    del iterator, loader
    resumed = make_loader(kind, workers, snapshot=snapshot)
    resumed.load_state_dict(state)
    assert got + flat(resumed) == epochs[0]
    assert flat(resumed) == epochs[1]


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("workers", [0, 2])
def test_its_position_can_be_taken_up_by_other_ranks(workers):
    loaders = [make_loader("stream", workers, ranks=2, rank=rank) for rank in range(2)]
    iterators, got = list(map(iter, loaders)), []
    for _ in range(5):
        got += flat(map(next, iterators))
    position = loaders[0].sampler.state_dict(consumed=5 * 4)
    del iterators, loaders
    for rank in range(3):
        loader = make_loader("stream", 2 - workers, ranks=3, rank=rank)
        loader.sampler.load_state_dict(position)
        got += flat(loader)
    assert sorted(got) == list(range(LENGTH))
