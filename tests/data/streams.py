"""Streams drawn at random, and jobs that read them, stop, and go on with other ranks and workers."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

import phalanx
from phalanx.data import Stream

KINDS = ("indexed", "read on", "skips")


class SkippingIterator(Iterator[int]):
    """It has a `skip`, as that of a format has in which a sample can be passed over without reading it."""

    def __init__(self, samples: list[int]) -> None:
        self._samples, self._at = samples, 0

    def skip(self, count: int) -> None:
        self._at += count

    def __next__(self) -> int:
        if self._at >= len(self._samples):
            raise StopIteration
        self._at += 1
        return self._samples[self._at - 1]


@dataclass(frozen=True)
class Shards:
    """Sample i of all shards is the number i; each shard is of one of the `KINDS`."""

    lengths: tuple[int, ...]
    kinds: tuple[str, ...]

    def read(self, shard: int) -> Any:
        begin = sum(self.lengths[:shard])
        samples = list(range(begin, begin + self.lengths[shard]))
        if self.kinds[shard] == "indexed":
            return samples
        return iter(samples) if self.kinds[shard] == "read on" else SkippingIterator(samples)

    def stream(self, **layout: int) -> Stream:
        return Stream(range(len(self.lengths)), self.read, lengths=self.lengths, **layout)


@dataclass(frozen=True)
class Phase:
    """A part of a job, in which it has so many ranks, each with so many workers; `steps` None is to the end."""

    ranks: int
    workers: int
    batch: int
    steps: int | None


@dataclass(frozen=True)
class Case:
    shards: Shards
    layout: dict[str, int]
    phases: tuple[Phase, ...]
    epochs: int
    shuffle: bool
    padding: bool
    drop_last: bool
    seed: int
    persistent: bool
    positions: list[dict[str, Any]] = field(default_factory=list, compare=False)

    def samplers(self, stream: Stream, ranks: int) -> list[phalanx.DistributedSampler]:
        options = {"shuffle": self.shuffle, "seed": self.seed, "drop_last": self.drop_last, "padding": self.padding}
        return [phalanx.DistributedSampler(stream, ranks, rank, **options) for rank in range(ranks)]


def draw_shards(draw: random.Random) -> Shards:
    """Few or many, alike or not, some of them empty."""
    count, most = draw.choice((1, 2, 3, 5, 8, 13, 30)), draw.choice((1, 3, 17, 40))
    lengths = [draw.randint(0, most) for _ in range(count)] if draw.random() < 0.7 else [most] * count
    lengths[draw.randrange(count)] += 1  # at least one sample
    return Shards(tuple(lengths), tuple(draw.choice(KINDS) for _ in range(count)))


def draw_layout(draw: random.Random) -> dict[str, int]:
    return {
        "interleave": draw.choice((1, 2, 3, 4, 12)),
        "readers": draw.choice((1, 2, 3, 4)),
        "block": draw.choice((1, 4, 8, 12, 64)),
        "window": draw.choice((1, 2, 7, 16, 128)),
    }


def draw_case(seed: int) -> Case:
    draw = random.Random(seed)
    phases = [
        Phase(draw.choice((1, 2, 3, 4)), draw.choice((0, 0, 0, 1, 2)), draw.choice((1, 2, 3, 4, 8)), draw.randint(0, 6))
        for _ in range(draw.choice((0, 1, 2, 3)))
    ]
    last = Phase(draw.choice((1, 2, 3, 4)), draw.choice((0, 0, 1, 2, 3)), draw.choice((1, 3, 4)), None)
    padding, drop_last = draw.choice(((False, False), (False, False), (True, False), (False, True)))
    return Case(
        draw_shards(draw),
        draw_layout(draw),
        (*phases, last),
        draw.choice((1, 1, 2)),
        draw.random() < 0.8,
        padding,
        drop_last,
        seed,
        draw.random() < 0.5,
    )


def read_case(case: Case) -> list[tuple[int, int, int]]:
    """Run the phases, one after another, each from the position that the one before has saved.

    Returns (epoch, step, sample) of all that was used.
    """
    used: list[tuple[int, int, int]] = []
    state: dict[str, Any] | None = None
    epoch = step = 0
    for phase in case.phases:
        stream = case.shards.stream(**case.layout)
        samplers = case.samplers(stream, phase.ranks)
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        loaders = [
            DataLoader(
                case.shards.stream(**case.layout),
                batch_size=phase.batch,
                sampler=sampler,
                num_workers=phase.workers,
                collate_fn=list,
                persistent_workers=case.persistent and phase.workers > 0,
            )
            for sampler in samplers
        ]
        left = phase.steps
        while epoch < case.epochs and left != 0:
            first = step
            for batches in itertools.zip_longest(*map(iter, loaders), fillvalue=()):
                used += [(epoch, step, sample) for batch in batches for sample in batch]
                step += 1
                left = None if left is None else left - 1
                if left == 0:
                    break
            states = [sampler.state_dict((step - first) * phase.batch) for sampler in samplers]
            # A rank whose part is one sample shorter does not know of the last batch that others have: rank 0 does.
            assert case.padding or all(one == states[0] or one["consumed"] == 0 for one in states), states
            assert not case.padding or all(one == states[0] for one in states), states
            state, epoch = states[0], states[0]["epoch"]
            case.positions.append(state)
        del loaders
    return used
