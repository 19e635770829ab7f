"""`BatchSizes` says how many samples each batch of an epoch has before it is read: the last one may be short."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, cast

from torch.utils.data import DataLoader


@dataclass(frozen=True)
class BatchSizes:
    """`BatchSizes` has the sizes of `total` batches: all have `full` samples but the last, which has `last`."""

    total: int
    full: int
    last: int

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> BatchSizes:
        """Return the sizes for what is left of the epoch. Samples that are batches themselves count as one each."""
        total = len(loader)
        batch_size = getattr(loader.batch_sampler, "batch_size", None)
        if batch_size is None or loader.batch_sampler.drop_last or not total:  # type: ignore[union-attr]
            return cls(total, 1, 1)
        if getattr(loader.sampler, "num_parts", 1) > 1:  # the batches come from several ranks by turns
            return cls(total, 1, 1)
        return cls(total, batch_size, len(cast("Sized", loader.sampler)) - (total - 1) * batch_size)

    def share(self, number: int, group: range) -> float:
        """Return the share of the samples of the batches `group` that are in batch `number`, which is one of them."""
        together = self.full * len(group) - (self.full - self.last) * (self.total - 1 in group)
        return (self.last if number == self.total - 1 else self.full) / together
