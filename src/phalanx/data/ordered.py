"""An `OrderedDataset` defines the order of its samples in an epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from torch.utils.data import Dataset

from phalanx.data.permutation import Indices


class IndexOrder(Protocol):
    """`IndexOrder` maps positions in an epoch to indices of the dataset."""

    def take(self, positions: Indices) -> Indices:
        """Return the indices at `positions`.

        Shape: `positions` and the result (n).
        """


class OrderedDataset(Dataset[Any], ABC):
    """`OrderedDataset` is a map-style dataset that gives `phalanx.DistributedSampler` the order of its samples."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def order(self, seed: int, epoch: int, *, shuffle: bool) -> IndexOrder:
        """Return the order of an epoch, which depends only on the epoch's number and the seed."""

    @abstractmethod
    def describe_order(self) -> dict[str, Any]:
        """Return what determines the order: a saved position is valid only for the same values."""


def epoch_key(seed: int, epoch: int) -> str:
    """Return the key of the permutation that shuffles an epoch."""
    return f"seed {seed}, epoch {epoch}"
