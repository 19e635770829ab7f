"""Split a structure into its tensors and a picklable skeleton, and join the two again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Leaf:
    """A `Leaf` replaces tensor number `index` in a structure that is sent without its tensors."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str


def split(value: Any, tensors: list[Tensor]) -> Any:
    """Return the structure of `value` with a `Leaf` for each tensor; append the tensors to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        form = value.detach()
        return Leaf(len(tensors) - 1, tuple(form.shape), tuple(form.stride()), form.dtype, str(form.device))
    if isinstance(value, dict):
        return _like(value, {key: split(one, tensors) for key, one in value.items()}) if _plain(value) else value
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(split(one, tensors) for one in value)
    return value


def join(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Rebuild the value from the results of `split`."""
    if isinstance(structure, Leaf):
        return tensors[structure.index]
    if isinstance(structure, dict):
        if not _plain(structure):
            return structure
        return _like(structure, {key: join(one, tensors) for key, one in structure.items()})
    if type(structure) in (list, tuple):
        return type(structure)(join(one, tensors) for one in structure)
    return structure


def leaves_of(structure: Any) -> list[Leaf]:
    """Return the leaves of the structure that `split` returned, in the order of its tensors."""
    if isinstance(structure, Leaf):
        return [structure]
    if isinstance(structure, dict):
        return [leaf for one in structure.values() for leaf in leaves_of(one)]
    return [leaf for one in structure for leaf in leaves_of(one)] if type(structure) in (list, tuple) else []


def _plain(value: dict[Any, Any]) -> bool:
    return type(value) is dict or type(value).__name__ == "OrderedDict"


def _like(value: dict[Any, Any], content: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict of the type of `value`, with its attributes: a module's `state_dict` has `_metadata`."""
    if type(value) is dict:
        return content
    made = type(value)(content)
    vars(made).update(vars(value))
    return made
