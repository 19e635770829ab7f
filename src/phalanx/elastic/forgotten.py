"""Find what the program trains with, and `State` does not have."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phalanx.data import DistributedSampler
from phalanx.elastic.rebind import WRAPPERS, averaging_modules

_KINDS = (*WRAPPERS, Optimizer, DistributedSampler)
_MOST = 1000  # a longer list holds data


def find_forgotten(things: Iterable[Any], modules: Iterable[nn.Module]) -> list[Any]:
    """Return wrappers and optimizers of parameters of `modules`, and samplers, that `things` neither are nor hold.

    Cost: a look at each object of the process, which takes about 50 ms.
    """
    modules = list(modules)
    parameters = {id(p) for module in modules for p in module.parameters()}
    averaged = {id(p) for wrapper in averaging_modules(modules) for p in wrapper.parameters()}
    held = _held_by(things)
    kinds = _with_subclasses(_KINDS)

    def find() -> list[Any]:
        found = [one for one in gc.get_objects() if type(one) in kinds and id(one) not in held]
        return [
            one
            for one in found
            if isinstance(one, DistributedSampler)
            or not (
                parameters.isdisjoint(updated_by(one))
                if isinstance(one, Optimizer)
                else (parameters - averaged).isdisjoint(map(id, one.parameters()))
            )
        ]

    if not find():
        return []
    gc.collect()  # what nobody uses may still exist
    return find()


def updated_by(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer updates."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _held_by(things: Iterable[Any]) -> set[int]:
    """Return the ids of `things`, and of what they hold: as attributes, and inside lists and dicts of these."""
    held: set[int] = set()
    level = list(things)
    for _ in range(4):
        held.update(map(id, level))
        level = [inner for one in level for inner in _parts(one) if id(inner) not in held]
    return held


def _parts(one: Any) -> Iterable[Any]:
    kind = type(one)
    if issubclass(kind, (nn.Module, LRScheduler, ModuleType, type)):  # a scheduler has no part of its optimizer's state
        return ()
    if issubclass(kind, (list, tuple, dict)):
        return () if len(one) > _MOST else one.values() if issubclass(kind, dict) else one
    return getattr(one, "__dict__", {}).values()


def _with_subclasses(kinds: Iterable[type]) -> set[type]:
    found: set[type] = set()
    more = list(kinds)
    while more:
        kind = more.pop()
        if kind not in found:
            found.add(kind)
            more += type.__subclasses__(kind)
    return found
