"""An `OrderedDataset` says itself in which order an epoch goes through it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from torch.utils.data import Dataset

from phalanx.data.permutation import Indices


class IndexOrder(Protocol):
    """`IndexOrder` is a function from positions of an epoch to indices of the dataset."""

    def take(self, positions: Indices) -> Indices:
        """Return the indices at `positions`.

        Shape: (n), and so is the result.
        """


class OrderedDataset(Dataset[Any], ABC):
    """`OrderedDataset` is a map-style dataset with an order for `phalanx.DistributedSampler` to use."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def order(self, seed: int, epoch: int, *, shuffle: bool) -> IndexOrder:
        """Return the order of an epoch, which depends on nothing else."""

    @abstractmethod
    def describe_order(self) -> dict[str, Any]:
        """Return what makes the order: a saved position belongs to the same order only."""


def epoch_key(seed: int, epoch: int) -> str:
    """Return the values of which an epoch's shuffle is made."""
    return f"seed {seed}, epoch {epoch}"
