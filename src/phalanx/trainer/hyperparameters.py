"""Collect a run's settings for its loggers: the Trainer's, the optimizer's, and those that the user names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.trainer.trainer import Trainer


def collect_hyperparameters(
    trainer: Trainer, batch_size: int | None, settings: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return settings by name, as numbers or words; `own`, the user's, win if two have one name.

    `batch_size` is that of a replica.
    """
    strategy, optimizer = trainer.strategy, trainer.optimizer
    model = strategy.bare_model
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    plain = {name: value for name, value in group.items() if isinstance(value, bool | int | float | str)}
    found = {
        "model": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "strategy": type(strategy).__name__,
        "replicas": strategy.num_replicas_in_sync,
        "batch_size": (batch_size or 1) * strategy.num_replicas_in_sync,
        "optimizer": type(optimizer).__name__,
        **{f"optimizer/{name}": value for name, value in plain.items()},
        "scheduler": None if trainer.scheduler is None else type(trainer.scheduler).__name__,
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        **settings,
    }
    return {**{name: value for name, value in found.items() if value is not None}, **own}
