"""Measure a model: the loss and the metrics over all samples of all ranks, counting each sample once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx._base.torch_names import find
from phalanx._comm.transport.tensors import move_batch
from phalanx.checkpoint.best import Best
from phalanx.data import DistributedSampler
from phalanx.strategies import Strategy
from phalanx.strategies.iterable_loader import IterableLoader
from phalanx.strategies.loss import require_pair
from phalanx.trainer.callbacks import EarlyStopping
from phalanx.trainer.loaders import FitLoader, Loaders, divide
from phalanx.trainer.metrics import SummedMetric, Sums, call_metric, num_samples

tree_map: Any = find("torch.utils._pytree.tree_map", loses="phalanx.Trainer does not move batches")

Metric = Callable[[Any, Any], Tensor] | SummedMetric


class Validation:
    """`Validation` measures `model` for a `Trainer`, by `loss` and `metrics` or else by its `validation_step`."""

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None,
        metrics: Mapping[str, Metric],
        most_batches: int | None,
        is_obsolete: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create a validation; `is_obsolete` returns whether the training stops, so that the result is not needed."""
        self._strategy, self._model = strategy, model
        self._loss, self._metrics = loss, metrics
        self._most_batches = most_batches
        self._is_obsolete = is_obsolete

    def divide(self, loader: Any) -> Loaders:
        """Divide a loader, or each loader of a dict. Call it before the first step, to report errors early."""
        if isinstance(loader, Mapping):
            return {
                name: divide(self._strategy, f"val_loader[{name!r}]", one, padding=False)
                for name, one in loader.items()
            }
        return divide(self._strategy, "val_loader", loader, padding=False)

    def check_metrics(self, loader: Loaders, watchers: Sequence[Any]) -> None:
        """Raise ValueError if a watcher (a `Best`, an `EarlyStopping`) needs a metric that will not be measured.

        The check runs before the first step, when the results of the model's `validation_step` are not known yet.
        """
        if loader is None:
            if stops := [one for one in watchers if isinstance(one, EarlyStopping)]:
                raise ValueError(f"EarlyStopping watches {stops[0].monitor!r} of the validation: give fit a val_loader")
            return
        if self._loss is None:
            return
        names = ["loss", *self._metrics]
        if isinstance(loader, Mapping):
            names = [f"{one}/{metric}" for one in loader for metric in names]
        for watcher in watchers:
            wanted = getattr(watcher, "metric" if isinstance(watcher, Best) else "monitor", None)
            if isinstance(watcher, Best | EarlyStopping) and wanted not in names:
                who = "Trainer: keep_best" if isinstance(watcher, Best) else "EarlyStopping"
                raise ValueError(f"{who}: {wanted!r} is not a metric of the validation: {sorted(names)}")

    def measure(self, loader: Loaders) -> dict[str, float]:
        """Return the loss and the metrics. All ranks call it. With a dict of loaders, names are "name/metric"."""
        if isinstance(loader, Mapping):
            measured = {name: self.measure(one) for name, one in loader.items()}
            return {f"{name}/{metric}": value for name, of in measured.items() for metric, value in of.items()}
        strategy = self._strategy
        place = strategy.num_replicas_in_sync, strategy.replica_id_in_sync_group
        inner = loader.loader if isinstance(loader, FitLoader) else loader
        if strategy.is_elastic:  # ranks may have been lost, or have joined
            if isinstance(sampler := getattr(inner, "sampler", None), DistributedSampler):
                sampler.regroup(*place)
            elif isinstance(inner, IterableLoader):
                inner.regroup(*place)
        divided = divide(strategy, "val_loader", loader, padding=False)
        sums = Sums(strategy.device)
        was_training = self._model.training  # a Pipeline is not among its own modules()
        modes = {module: module.training for module in self._model.modules()}  # frozen layers may be in eval mode
        strategy.sync_buffers()
        self._model.eval()
        try:
            for batch, counts in divided.validation_batches(self._most_batches):
                self._add(on_device(batch, strategy.device), sums if counts else Sums(strategy.device))
                if self._is_obsolete() and strategy.is_in_step and not strategy.evaluates_together:
                    break
        finally:
            self._model.train(was_training)  # `train` may do more than set the flag
            for module, mode in modes.items():
                module.training = mode
        totals = sums.compute(strategy.training_group)
        summed = {name: one.compute for name, one in self._metrics.items() if isinstance(one, SummedMetric)}
        return {
            name: float(summed[name](total) if name in summed else total / count)
            for name, (total, count) in totals.items()
        }

    def _add(self, batch: Any, sums: Sums) -> None:
        """Add a batch to `sums`, unless only another rank has the model's result."""
        count = num_samples(batch)
        if self._loss is None:
            for name, value in self._own_step(batch).items():
                sums.add_mean(name, value, count)
            sums.add_batch(count)
            return
        *inputs, target = require_pair(batch)
        result = self._strategy.evaluate(*inputs)
        if result is None:
            return
        result = tree_map(_in_full_precision, result)
        with torch.no_grad():
            sums.add_mean("loss", self._loss(result, target), count)
            for name, metric in self._metrics.items():
                if isinstance(metric, SummedMetric):
                    sums.add(name, call_metric(name, metric.count, result, target), count)
                else:
                    sums.add_mean(name, call_metric(name, metric, result, target), count)
        sums.add_batch(count)

    def _own_step(self, batch: Any) -> Mapping[str, Any]:
        bare = self._strategy.bare_model
        step = getattr(bare, "validation_step", None)
        if step is None:
            raise ValueError(
                f"Trainer.validate: without a loss function {type(bare).__name__} needs a validation_step(batch), "
                "which returns a dict of metrics"
            )
        with torch.no_grad(), self._strategy.autocasting():
            values = step(batch)
        if not isinstance(values, Mapping):
            raise TypeError(f"validation_step must return a dict of metrics by name, got a {type(values).__name__}")
        return values


def on_device(batch: Any, device: torch.device) -> Any:
    """Return the batch on a replica's device; on the CPU, it is there already."""
    return batch if device.type == "cpu" else move_batch(batch, device)


def _in_full_precision(leaf: Any) -> Any:
    """Convert a result in half precision (from autocast) to float32, so that metrics are not rounded to half."""
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in (torch.bfloat16, torch.float16) else leaf
