"""Find the model of which an optimizer updates a part, to save the optimizer's state with names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

Layout = list[list[str]]
"""The names of the parameters of each group of an optimizer, in the order of their numbers."""


@runtime_checkable
class PartOwner(Protocol):
    """A `PartOwner` is a model of which each rank has a part, such as a Pipeline."""

    @property
    def state_names(self) -> list[str]:
        """Return the keys of the whole model's state."""

    def own_state_dict(self) -> dict[str, Any]:
        """Return this rank's entries, under the whole model's keys. A rank may call it alone."""

    def gather_state_dict(self) -> dict[str, Any]:
        """Return the whole state on the first rank, and on others their own part. All ranks call it."""

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the state of an equivalent optimizer of the whole model. All ranks call it."""

    def own_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's entries of that state; with "layout", as `shard_state_dict`. All ranks call it."""

    def optimizer_layout(self, optimizer: torch.optim.Optimizer) -> Layout:
        """Return the groups of such an optimizer. All ranks call it."""

    def fit_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], layout: Layout | None
    ) -> tuple[dict[str, Any], list[str]]:
        """Return this optimizer's part of a whole state, and sentences on entries that do not fit. Change nothing."""


class _Entry(NamedTuple):
    """An `_Entry` is a name in the whole model, "" for what only optimizers use. The owner may be gone."""

    name: str
    owner: Callable[[], PartOwner | None]


# a Parameter compares its elements, so it cannot be a key of a plain dict
_entries: MutableMapping[torch.Tensor, _Entry] = WeakIdKeyDictionary()


def register(name: str, parameter: nn.Parameter, owner: PartOwner) -> None:
    """Register `name` as the name of `parameter` in the whole model, of which `owner` has a part here."""
    _entries[parameter] = _Entry(name, weakref.ref(owner))


def whole_name(parameter: torch.Tensor) -> str | None:
    """Return the name of `parameter` in the whole model; None if it is not in a part of one."""
    entry = _entries.get(parameter)
    return None if entry is None else entry.name


def owner_of(optimizer: torch.optim.Optimizer) -> PartOwner | None:
    """Return the model of which this optimizer updates a part, and nothing else, or None."""
    parameters: Sequence[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    entries = [_entries.get(parameter) for parameter in parameters]
    owners = {id(owner): owner for e in entries if (owner := None if e is None else e.owner()) is not None}
    if len(owners) != 1 or None in entries:
        return None
    return next(iter(owners.values()))
