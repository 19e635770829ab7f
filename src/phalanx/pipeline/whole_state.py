"""Build the state of the whole model from those of its stages, and each stage's from the whole."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx._comm.transport.memory_order import Strides, find_strides, flatten, restore

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
_SMALL_BYTES = 1024  # tensors up to here, as the numbers of steps that optimizers keep, go with the description


def gather_state(
    own: Mapping[_Key, Any], names: Sequence[_Key], group: dist.ProcessGroup, *, rank0_only: bool = False
) -> OrderedDict[_Key, Any]:
    """Return the entries of all ranks in the order of `names`; with `rank0_only` the other ranks get only their own.

    All ranks call it. What several ranks have is taken from the first of them.
    Cost: with `rank0_only` every rank sends its own to the first; else all get all, one tensor at a time.
    """
    found = gather_entries(own, group, rank0_only=rank0_only)
    return OrderedDict((name, found[name]) for name in names if name in found)


def gather_entries(own: Mapping[_Key, Any], group: dist.ProcessGroup, *, rank0_only: bool = False) -> dict[_Key, Any]:
    """Return what `gather_state` does, in the order of the ranks."""
    rank = group.rank()
    described: list[Any] = [None] * group.size()
    dist.all_gather_object(described, {name: _describe(value) for name, value in own.items()}, group=group)
    found: dict[_Key, Any] = {}
    for source, entries in enumerate(described):
        for name, entry in entries.items():
            if name not in found:
                found[name] = _fetch(own.get(name), entry, source, rank, group, rank0_only)
    return dict(own) if rank0_only and rank else found


def _describe(value: Any) -> tuple[str, Any, Any, Strides | None]:
    if isinstance(value, Tensor) and value.nbytes > _SMALL_BYTES:
        return "tensor", tuple(value.shape), value.dtype, find_strides(value)
    return "object", value.detach().cpu() if isinstance(value, Tensor) else value, None, None


def _fetch(mine: Any, entry: tuple[str, Any, Any, Any], source: int, rank: int, group: Any, rank0_only: bool) -> Any:
    kind, shape, dtype, strides = entry  # an entry may also be the object itself
    if kind == "object":
        return mine if rank == source else shape
    if rank0_only and (source == 0 or rank not in (0, source)):
        return mine
    if rank == source:
        flat = flatten(mine, strides)
    else:
        flat = torch.empty(shape if strides is None else math.prod(shape), dtype=dtype)
    if not rank0_only:
        dist.broadcast(flat, group=group, group_src=source)
    elif rank == source:
        group.send([flat], 0, 0).wait()
    else:
        group.recv([flat], source, 0).wait()
    return mine if rank == source else restore(flat, shape, strides)


def first_names(module: nn.Module) -> dict[str, str]:
    """Return, for every key of the module's state, the first key of the same parameter, buffer or extra state.

    They differ where a module is registered under several names, or a parameter in several modules.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    first: dict[tuple[int, str], str] = {}
    found: dict[str, str] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        path, _, last = name.rpartition(".")
        if isinstance(value, Tensor):
            found[name] = first.setdefault((id(value), ""), name)
        else:
            found[name] = first.setdefault((id(modules.get(path, name)), last), name)
    return found


def with_every_name(own: Mapping[str, _Value], first: Mapping[str, str]) -> dict[str, _Value]:
    """Return `own` with each entry under all the names that it has in the whole model; `first` is of `first_names`."""
    known = {first.get(name, name): value for name, value in own.items()}
    others = {name: known[same] for name, same in first.items() if same in known and name not in own}
    return {**own, **others}


def select_own(state: Mapping[str, Any], own: Iterable[str], first: Mapping[str, str]) -> dict[str, Any]:
    """Return what of a whole state goes into the entries `own`; for an entry with several names, the last saved.

    That is the one which stays where plain PyTorch loads the whole model.
    """
    last = {first.get(name, name): state[name] for name in dict.fromkeys([*first, *own]) if name in state}
    selected = OrderedDict((name, last[first.get(name, name)]) for name in own if first.get(name, name) in last)
    if (versions := getattr(state, "_metadata", None)) is not None:  # by which modules know how to read it
        selected._metadata = versions  # type: ignore[attr-defined]
    return selected


def require_same_names(state: Mapping[str, Any], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the keys (missing, unexpected) in `state`, as `load_state_dict` of the whole model would find them."""
    known = set(names)
    return [name for name in names if name not in state], [name for name in state if name not in known]
