"""Check the arguments of a Trainer, and report all problems at once."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx.strategies import Strategy
from phalanx.trainer.callbacks import Callback


def find_problems(
    model: Any, optimizer: Any, strategy: Any, loss: Any, metrics: Any, callbacks: Any, seed: Any, scheduler: Any
) -> list[str]:
    """Return the problems of a Trainer's arguments."""
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
            "validation_step returns nothing: it must return a dict of metrics by name (what it gives to self.log is "
            "not kept)",
        ),
        (loss is None or callable(loss), f"loss must be a function of the model's result and the target, got {loss!r}"),
        (loss is not None or not metrics, "metrics need a loss: without one the model's validation_step returns them"),
        (is_metrics, f"metrics must be a dict of functions by name, got a {type(metrics).__name__}"),
        (not is_metrics or "loss" not in (metrics or {}), "metrics: the loss is measured in any case, as 'loss'"),
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
    """Return whether the model has a step of that name which cannot be called with a batch."""
    try:
        inspect.signature(getattr(model, name)).bind(None)
    except TypeError:
        return True
    except (AttributeError, ValueError):  # there is none, or its signature is unknown
        return False
    return False


# One per range of Python versions: up to 3.14, from 3.12 to 3.13, and from 3.15 on.
_LOADS_OF_NONE = ("LOAD_CONST", "RETURN_CONST", "LOAD_COMMON_CONSTANT")


def returns_nothing(function: Any) -> bool:
    """Return whether a function or method can only return None; False if its code is unknown."""
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
