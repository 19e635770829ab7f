"""Means over all samples of all ranks, each counted once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree


def num_samples(batch: Any) -> int:
    """The first dimension of the batch's first tensor.

    Raises:
        ValueError: there is no tensor in it.
    """
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            return leaf.shape[0] if leaf.dim() else 1
    raise ValueError("a batch without a tensor: nobody can tell how many samples it has")


class Means:
    """Running means by name, exact with uneven last batches and different numbers of batches on the ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    @property
    def names(self) -> list[str]:
        """Those that were counted."""
        return list(self._sums)

    def add(self, values: dict[str, Tensor], count: int) -> None:
        """Count a batch of `count` samples.

        Shape: of a value (count) or (count, 1), one number for each sample, or one element, the mean of the batch.

        Raises:
            ValueError: another shape.
        """
        self._count += count
        for name, value in values.items():
            value = torch.as_tensor(value, device=self._device).detach().double()
            if value.numel() == count and value.dim():
                total = value.sum()
            elif value.numel() == 1:
                total = value.reshape(()) * count
            else:
                raise ValueError(
                    f"metric {name!r} has shape {tuple(value.shape)} for {count} samples: it must be one number for "
                    "each sample, or one for the batch"
                )
            self._sums[name] = self._sums.get(name, torch.zeros((), dtype=torch.float64, device=self._device)) + total

    def compute(self, names: list[str], group: dist.ProcessGroup | None) -> dict[str, float]:
        """The means, on every rank. Collective; `names` are the same on all, also on one that counted nothing.

        Raises:
            ValueError: no rank has counted a sample.
        """
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        sums = torch.stack([zero + self._count, *(self._sums.get(name, zero) for name in names)])
        if group is not None:
            dist.all_reduce(sums, group=group)
        count, *totals = sums.tolist()
        if count == 0:
            raise ValueError("the validation loader has no sample")
        return {name: total / count for name, total in zip(names, totals, strict=True)}
