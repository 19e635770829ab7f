"""Check and parse the arguments of a Trainer; report all problems at once."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx.checkpoint.best import Best, KeepBest
from phalanx.strategies import Strategy
from phalanx.trainer.callbacks import Callback


def find_problems(
    model: Any, optimizer: Any, strategy: Any, loss: Any, metrics: Any, callbacks: Any, seed: Any, scheduler: Any
) -> list[str]:
    """Return a description of each problem with a Trainer's arguments."""
    several = callbacks if isinstance(callbacks, Sequence) else [callbacks]
    wrong = [one for one in several if not isinstance(one, Callback)]
    name, has_model = type(strategy).__name__, isinstance(strategy, Strategy) and strategy.is_set_up
    is_metrics, lacks = isinstance(metrics or {}, Mapping), loss is None and not hasattr(model, "training_step")
    checks = (
        (isinstance(model, nn.Module), f"model must be a torch.nn.Module, got a {type(model).__name__}"),
        (
            isinstance(optimizer, Optimizer) or callable(optimizer),
            f"optimizer must be a torch.optim.Optimizer, or a function that makes one of parameters, got {optimizer!r}",
        ),
        (not lacks, f"give a loss, or {type(model).__name__} a training_step(batch)"),
        (
            loss is not None or not _lacks_arguments(model, "training_step"),
            "training_step must take the batch alone, no batch_idx",
        ),
        (
            loss is not None or not _lacks_arguments(model, "validation_step"),
            "validation_step must take the batch alone, no batch_idx",
        ),
        (
            loss is not None or not returns_nothing(getattr(model, "training_step", None)),
            "training_step returns nothing: it must return the loss",
        ),
        (
            loss is not None or not returns_nothing(getattr(model, "validation_step", None)),
            "validation_step returns nothing: it must return a dict of metrics by name (values passed to self.log "
            "are not kept)",
        ),
        (loss is None or callable(loss), f"loss must be a function of the model's result and the target, got {loss!r}"),
        (loss is not None or not metrics, "metrics need a loss: without one the model's validation_step returns them"),
        (is_metrics, f"metrics must be a dict of functions by name, got a {type(metrics).__name__}"),
        (
            not is_metrics or "loss" not in (metrics or {}),
            "metrics: 'loss' is the loss itself, which is always measured",
        ),
        (not wrong, f"callbacks must be phalanx.trainer.Callback objects, got {wrong[:1]}"),
        (not has_model, f"this {name} has a model already: each Trainer needs one of its own"),
        (seed is None or isinstance(seed, int), f"seed must be an int, got {seed!r}"),
        (
            scheduler is None or isinstance(scheduler, LRScheduler) or callable(scheduler),
            f"scheduler must be an LRScheduler, or a function that makes one, got {scheduler!r}",
        ),
    )
    return [problem for fine, problem in checks if not fine]


def _lacks_arguments(model: Any, name: str) -> bool:
    """Return whether the model's step of that name cannot be called with a batch alone."""
    try:
        inspect.signature(getattr(model, name)).bind(None)
    except TypeError:
        return True
    except (AttributeError, ValueError):  # there is none, or its signature is unknown
        return False
    return False


# The opcodes that load None: in Python up to 3.14, in 3.12 and 3.13, and from 3.15 on.
_LOADS_OF_NONE = ("LOAD_CONST", "RETURN_CONST", "LOAD_COMMON_CONSTANT")


def returns_nothing(function: Any) -> bool:
    """Return whether a function can only return None; False for a generator or coroutine, or if its code is unknown."""
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    if code is None or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return False
    before, ends = None, list[bool]()
    for one in dis.get_instructions(code):
        if one.opname in ("RETURN_VALUE", "RETURN_CONST"):
            last = one if one.opname == "RETURN_CONST" else before
            ends.append(last is not None and last.opname in _LOADS_OF_NONE and last.argval is None)
        before = one
    return bool(ends) and all(ends)


SaveEvery = int | Literal["epoch"] | tuple[Literal["epochs"], int]
Resume = Literal["latest", "best"]


@dataclass(frozen=True)
class Saves:
    """`Saves` decides when to save: every `steps` updates or `epochs` epochs, and after each of the best epochs."""

    steps: int | None = None
    epochs: int | None = 1
    best: Best | None = None

    @classmethod
    def of(cls, save_every: SaveEvery | None, keep_best: KeepBest | None) -> Saves:
        """Return the `Saves` for a Trainer's arguments.

        Raises:
            ValueError: the arguments are invalid.
        """
        best = None if keep_best is None else Best.of(keep_best)
        if save_every is None or save_every == "epoch":
            return cls(best=best)
        if is_count(save_every):
            assert isinstance(save_every, int)
            return cls(save_every, None, best)
        if isinstance(save_every, (tuple, list)) and len(save_every) == 2:
            unit, count = save_every
            if unit == "epochs" and is_count(count):
                return cls(None, count, best)
        raise ValueError(
            f"save_every must be 1 or more updates, 'epoch', or epochs as in ('epochs', 5), got {save_every!r}"
        )

    def is_due_at_step(self, step: int) -> bool:
        return self.steps is not None and step % self.steps == 0

    def is_due_at_epoch(self, epoch: int) -> bool:
        return self.epochs is not None and epoch % self.epochs == 0

    def judge(self, kept: tuple[float, ...], metrics: dict[str, float]) -> tuple[tuple[float, ...], bool]:
        """Add a validation's metric to the best values `kept`; return the best values, and whether it is one of them.

        Raises:
            ValueError: the metric was not measured.
        """
        if self.best is None:
            return kept, False
        if self.best.metric not in metrics:
            raise ValueError(
                f"Trainer: keep_best: {self.best.metric!r} is not a metric of the validation: {sorted(metrics)}"
            )
        return self.best.add(kept, metrics[self.best.metric])


def is_count(value: object) -> bool:
    """Return whether `value` is an int of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
