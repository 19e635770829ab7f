"""Compute means and other metrics over all samples of all ranks, counting each sample once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.torch_names import find
from phalanx.errors import summary_of

_tree_iter: Any = find("torch.utils._pytree.tree_iter", loses="phalanx.Trainer does not count the samples of a batch")


def num_samples(batch: Any) -> int:
    """Return the size of the first dimension of the batch's first tensor; 1 if that tensor is 0-dim.

    Raises:
        ValueError: the batch has no tensor.
    """
    first = _first_tensor(batch)
    if first is None:
        raise ValueError("a batch without a tensor: its number of samples is unknown")
    return first.shape[0] if first.dim() else 1


def num_samples_or_one(batch: Any) -> int:
    """Return `num_samples` of the batch; 1 if it has no tensor."""
    first = _first_tensor(batch)
    return 1 if first is None or not first.dim() else first.shape[0]


def _first_tensor(batch: Any) -> Tensor | None:
    """Return the first tensor in nested mappings, sequences and objects whose class is registered as a pytree."""
    if isinstance(batch, Tensor):
        return batch
    parts: Iterable[Any]
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, (list, tuple)):
        if isinstance(batch, list) and batch and isinstance(batch[0], (str, bytes, int, float)):
            return None  # samples that are not tensors: do not search a long list
        parts = batch
    elif isinstance(batch, Sequence):
        parts = () if isinstance(batch, (str, bytes)) else batch
    else:
        return next((leaf for leaf in _tree_iter(batch) if isinstance(leaf, Tensor)), None)
    return next((first for part in parts if (first := _first_tensor(part)) is not None), None)


@dataclass(frozen=True)
class SummedMetric:
    """`SummedMetric` is a metric that is not a mean over samples: `compute` receives the summed results of `count`.

        recall = SummedMetric(
            lambda result, target: torch.stack([(result.argmax(1) * target).sum(), target.sum()]),
            lambda sums: sums[0] / sums[1],
        )

    Shape: the result of `count` has any shape, the same for each batch; `compute` receives the sum in float64, and
    returns one number.
    """

    count: Callable[[Any, Any], Tensor]
    compute: Callable[[Tensor], Any]


def call_metric(name: str, function: Callable[[Any, Any], Tensor], result: Any, target: Any) -> Tensor:
    """Return the metric's result for a batch.

    Raises:
        RuntimeError: the metric fails; the message names it, and its own error is the cause.
    """
    try:
        return function(result, target)
    except Exception as error:
        raise RuntimeError(f"Trainer: metric {name!r} fails: {summary_of(error)}") from error


class Sums:
    """`Sums` has a validation's sums by name. Each sample has the same weight, even if batches are uneven."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, tuple[Tensor, int]] = {}  # with the number of samples in the batches that have the metric
        self._num_samples = 0

    def add_batch(self, count: int) -> None:
        self._num_samples += count

    def add_mean(self, name: str, value: Any, count: int) -> None:
        """Add a metric's value for a batch of `count` samples.

        Shape: (count) or (count, 1), one number for each sample, or one element, the mean of the batch.

        Raises:
            ValueError: another shape.
        """
        value = torch.as_tensor(value, device=self._device).detach().double()
        if value.numel() == count and value.dim():
            self.add(name, value.sum(), count)
        elif value.numel() == 1:
            self.add(name, value.reshape(()) * count, count)
        else:
            raise ValueError(
                f"metric {name!r} has shape {tuple(value.shape)} for {count} samples: it must be one number for each "
                "sample, or one for the batch. For a metric that is not a mean, use phalanx.trainer.SummedMetric"
            )

    def add(self, name: str, value: Any, count: int) -> None:
        """Add the value of a batch of `count` samples to the sum of that name.

        Raises:
            ValueError: the sum had another shape before.
        """
        value = torch.as_tensor(value, device=self._device).detach().double()
        sum_, num_samples = self._sums.get(name, (torch.zeros_like(value), 0))
        if sum_.shape != value.shape:
            raise ValueError(
                f"metric {name!r} has shape {tuple(value.shape)}, but had {tuple(sum_.shape)} in the previous batch"
            )
        self._sums[name] = sum_ + value, num_samples + count

    def compute(self, group: dist.ProcessGroup | None) -> dict[str, tuple[Tensor, int]]:
        """Return the sums by name over all ranks, each with its number of samples. All ranks call it, and get the same.

        Raises:
            ValueError: no rank has a sample.
        """
        own = self._num_samples, {name: (one.cpu(), count) for name, (one, count) in self._sums.items()}
        everyone: list[Any] = [own]
        if group is not None:
            everyone = [None] * group.size()
            dist.all_gather_object(everyone, own, group=group)
        sums: dict[str, tuple[Tensor, int]] = {}
        for _, theirs in everyone:  # in rank order, so that all ranks get bitwise equal sums
            for name, (value, count) in theirs.items():
                sums[name] = (sums[name][0] + value, sums[name][1] + count) if name in sums else (value, count)
        if not any(num_samples for num_samples, _ in everyone):
            raise ValueError("the validation loader has no sample")
        return sums
