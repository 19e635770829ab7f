"""Datasets and samples whose order is drawn from the global random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset

DRAWS = {
    "torch": lambda size: torch.randperm(size).tolist(),
    "python": lambda size: random.sample(range(size), size),
    "numpy": lambda size: np.random.permutation(size).tolist(),
}


class Shuffled(IterableDataset):
    """The numbers below `size` in an order that `draws` gives; with a `buffer`, numbers are drawn on the way, too."""

    def __init__(self, size: int, draws: str = "torch", buffer: int = 0) -> None:
        self.size, self.draws, self.buffer = size, draws, buffer

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.buffer:
            yield from map(as_sample, DRAWS[self.draws](self.size))
            return
        held: list[int] = []
        for number in range(self.size):
            held.append(number)
            if len(held) > self.buffer:
                yield as_sample(held.pop(DRAWS[self.draws](len(held))[0]))
        while held:
            yield as_sample(held.pop(DRAWS[self.draws](len(held))[0]))


def as_sample(number: int) -> torch.Tensor:
    return torch.tensor([float(number)])


def seed_globals(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
