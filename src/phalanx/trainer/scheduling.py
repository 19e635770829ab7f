"""Make the scheduler of a Trainer's learning rate, and step it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from phalanx.strategies import Strategy


def make_scheduler(
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None,
    optimizer: Optimizer,
    strategy: Strategy,
    interval: Literal["epoch", "step"],
) -> LRScheduler | None:
    """Return the scheduler of `optimizer`, which `strategy` may have made anew, or None if there is to be none.

    Raises:
        ValueError: it is of another optimizer, or can't step with each update.
    """
    if scheduler is None:
        return None
    if not isinstance(scheduler, LRScheduler):
        made = scheduler(optimizer)
    elif scheduler.optimizer is optimizer:
        made = scheduler
    else:
        kind = type(scheduler).__name__
        raise ValueError(
            f"Trainer: the {kind} is of another optimizer than the one that trains, which {type(strategy).__name__} "
            f"has made: give a function, scheduler=lambda optimizer: {kind}(optimizer, ...)"
        )
    if isinstance(made, ReduceLROnPlateau) and interval == "step":
        raise ValueError("Trainer: ReduceLROnPlateau steps by what validation measures: scheduler_interval='epoch'")
    return made


def step_scheduler(scheduler: LRScheduler, metrics: Mapping[str, float]) -> None:
    """Step at the end of an epoch, whose validation has measured `metrics`.

    Raises:
        ValueError: the scheduler goes by the loss, which was not measured.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        if "loss" not in metrics:
            raise ValueError(f"Trainer: ReduceLROnPlateau steps by a metric 'loss', and there is {[*metrics]}")
        scheduler.step(metrics["loss"])
    else:
        scheduler.step()
