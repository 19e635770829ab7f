"""`Loss` computes the loss of a micro-batch from the model's result and the rows of the target that belong to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from phalanx.pipeline import micro_batches as batches
from phalanx.pipeline.edges import StepPlan


class Loss:
    """A `Loss` computes the loss on the last stage: by a function of result and target, or the result is the loss."""

    def __init__(self, loss_fn: Callable[..., Tensor] | None, *, mean: bool) -> None:
        """Compute by `loss_fn`. With `mean` it is a mean over samples, so that each micro-batch counts by its rows."""
        self._loss_fn = loss_fn
        self._mean = mean

    def for_target(self, target: Any, result: Callable[[dict[fx.Node, Any]], Any]) -> Callable[..., Tensor]:
        """Return a function that makes a loss of a micro-batch's values; micro-batches come in order, some twice."""
        begins = {0: 0}

        def loss_of(micro_batch: int, step: StepPlan, results: dict[fx.Node, Any]) -> Tensor:
            begins[micro_batch + 1] = begins[micro_batch] + step.rows
            output = result(results)
            if self._loss_fn is None:
                loss = output
            else:
                if micro_batch == 0 and target is not None:
                    rows = batches.count_rows(target, "the target")
                    if rows != step.all_rows:
                        raise ValueError(f"the target has {rows} rows, the input {step.all_rows}")
                part = batches.take(target, begins[micro_batch], step.rows)
                loss = self._loss_fn(output, part) if target is not None else self._loss_fn(output)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                whose = "the model's result, without a loss_fn," if self._loss_fn is None else "loss_fn's result"
                raise TypeError(f"{whose} must be the loss, a tensor with one number, got {what}")
            return loss.reshape(()) * (step.rows / step.all_rows if self._mean else 1.0)

        return loss_of
