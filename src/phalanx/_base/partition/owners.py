"""Find the split model that an optimizer updates, to save the optimizer's state by parameter name."""

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
    """A `PartOwner` is a model that is split between ranks, such as a Pipeline."""

    @property
    def state_names(self) -> list[str]:
        """Return the keys of the whole model's state."""

    def own_state_dict(self) -> dict[str, Any]:
        """Return this rank's entries, under the whole model's keys. Not collective."""

    def gather_state_dict(self) -> dict[str, Any]:
        """Return the whole state on the first rank, and on each other rank that rank's part. All ranks call this."""

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer, *, rank0_only: bool = False) -> dict[str, Any]:
        """Return the state of an equivalent optimizer of the whole model. All ranks call this."""

    def own_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's entries of `optimizer_state_dict`, perhaps with a "layout". All ranks call this."""

    def optimizer_layout(self, optimizer: torch.optim.Optimizer) -> Layout:
        """Return the groups of an equivalent optimizer of the whole model. All ranks call this."""

    def fit_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], layout: Layout | None
    ) -> tuple[dict[str, Any], list[str]]:
        """Return this optimizer's part of a whole state, and messages on entries that do not fit. Changes nothing."""


class _Entry(NamedTuple):
    """An `_Entry` is a tensor's name in the whole model ("" if only optimizers use it), and a weak ref to its owner."""

    name: str
    owner: Callable[[], PartOwner | None]


# `==` compares the elements of a Parameter, so a Parameter cannot be a key of a plain weak dict
_entries: MutableMapping[torch.Tensor, _Entry] = WeakIdKeyDictionary()


def register(name: str, parameter: nn.Parameter, owner: PartOwner) -> None:
    """Register the name of `parameter` in the whole model, of which `owner` is this rank's part."""
    _entries[parameter] = _Entry(name, weakref.ref(owner))


def whole_name(parameter: torch.Tensor) -> str | None:
    """Return the name of `parameter` in the whole model; None if the model is not split."""
    entry = _entries.get(parameter)
    return None if entry is None else entry.name


def owner_of(optimizer: torch.optim.Optimizer) -> PartOwner | None:
    """Return the split model that owns all parameters of this optimizer; None if there is none."""
    parameters: Sequence[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    entries = [_entries.get(parameter) for parameter in parameters]
    owners = {id(owner): owner for e in entries if (owner := None if e is None else e.owner()) is not None}
    if len(owners) != 1 or None in entries:
        return None
    return next(iter(owners.values()))
