"""Get the states of a run's parts (models, optimizers, values) to save, and load the states that fit the parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx._base.partition.owners import PartOwner, owner_of, whole_name
from phalanx._comm.transport.memory_order import find_strides, lay_out
from phalanx._comm.transport.tensors import same_order
from phalanx.checkpoint.optimizer_fit import (
    OptimizerNotes,
    find_misfits,
    find_other_class,
    find_other_order,
    parameter_orders,
)
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.slices import slice_state
from phalanx.checkpoint.tree import is_dtensor
from phalanx.checkpoint.wrappers import (
    set_versions,
    unwrap_key,
    versions_as_wrapped,
    versions_of,
    without_wrappers,
    wrapper_prefixes,
)

_SHOWN = 8  # the maximum number of keys of one category in a message


@dataclass
class MismatchReport:
    """A `MismatchReport` lists the keys of a saved state that do not fit the parts, prefixed with the part's name."""

    missing: list[str] = field(default_factory=list)  # keys that the part has and the checkpoint lacks
    unexpected: list[str] = field(default_factory=list)  # keys that the checkpoint has and the part lacks
    # Entries are like "model.w: (3, 4) in the checkpoint, (3, 5) here": shapes, dtypes, or an optimizer's problem.
    misshapen: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether the report has entries."""
        return bool(self.missing or self.unexpected or self.misshapen)

    def __str__(self) -> str:
        kinds = (
            ("missing from the checkpoint", self.missing),
            ("in the checkpoint and unexpected", self.unexpected),
            ("that does not fit" if len(self.misshapen) == 1 else "that do not fit", self.misshapen),
        )
        return "\n".join(
            f"  {len(names)} {kind}: {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}"
            for kind, names in kinds
            if names
        )


def states_of(parts: Mapping[str, Any], peers: Peers, *, sharded: bool) -> dict[str, Any]:
    """Return the states to save: `state_dict()` of each part that has one; other parts are their own state.

    A sharded optimizer returns this rank's part if `sharded`; otherwise the whole state on rank 0, nothing elsewhere.
    """
    return {name: _state_of(part, peers, sharded=sharded) for name, part in parts.items()}


def is_collective(part: Any) -> bool:
    """Return whether all ranks must get this part's state together."""
    return (
        isinstance(part, PartOwner)
        or (isinstance(part, torch.optim.Optimizer) and owner_of(part) is not None)
        or hasattr(part, "consolidate_state_dict")
        or getattr(part, "is_collective", False)
    )


def describe_optimizers(parts: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the names and shapes of the parameters of each optimizer that has its whole state on every rank.

    A name is "" unless the parameter carries its name, as in a stage of a pipeline.
    """
    return {
        name: [(whole_name(p) or "", tuple(p.shape)) for g in part.param_groups for p in g["params"]]
        for name, part in parts.items()
        if isinstance(part, torch.optim.Optimizer)
        and not hasattr(part, "consolidate_state_dict")
        and owner_of(part) is None
    }


def _state_of(part: Any, peers: Peers, *, sharded: bool) -> Any:
    if isinstance(part, nn.Module):
        if isinstance(part, PartOwner):
            return part.own_state_dict() if sharded else part.gather_state_dict()
        return module_state(part)
    if isinstance(part, torch.optim.Optimizer) and (owner := owner_of(part)) is not None:
        if not sharded:
            return owner.optimizer_state_dict(part, rank0_only=True)
        own = owner.own_optimizer_state(part)
        return slice_state(own) if "layout" in own else own
    if hasattr(part, "consolidate_state_dict"):
        if sharded and hasattr(part, "shard_state_dict"):
            return slice_state(part.shard_state_dict())
        part.consolidate_state_dict(to=0)
        return part.state_dict() if peers.is_first else {}
    if hasattr(part, "loop_state_dict"):  # a sampler: DataLoader workers may be ahead of the loop
        return part.loop_state_dict()
    return part.state_dict() if hasattr(part, "state_dict") else part


def buffer_names(parts: Mapping[str, Any]) -> set[str]:
    """Return the names of buffers (running statistics, counters), which may differ by rank; rank 0's are saved."""
    found = set()
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            prefixes = wrapper_prefixes(part)
            found |= {f"{name}.{unwrap_key(key, prefixes)}" for key, _ in part.named_buffers(remove_duplicate=False)}
    return found


# -- keys ------------------------------------------------------------------------------------------------------------


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's `state_dict()`, without the `module.` and `_orig_mod.` of wrappers at any depth.

    If the model is split between ranks, this is this rank's part.
    """
    if isinstance(module, PartOwner):
        return module.own_state_dict()
    return without_wrappers(module.state_dict(), wrapper_prefixes(module))


# -- loading ---------------------------------------------------------------------------------------------------------


def fit_stages(
    parts: Mapping[str, Any], state: Mapping[str, Any], *, with_layout: bool = True
) -> dict[str, tuple[dict[str, Any], list[str]]]:
    """Return, for each optimizer of a split model, its part of the whole state, and the entries that do not fit.

    All ranks call this, unless `with_layout` is False: then only states without a layout fit.
    """
    found = {}
    for name, part in parts.items():
        if name in state and isinstance(part, torch.optim.Optimizer) and (owner := owner_of(part)) is not None:
            layout = owner.optimizer_layout(part) if with_layout else None
            if isinstance(state[name], Mapping) and isinstance(state[name].get("param_groups"), list):
                found[name] = owner.fit_optimizer_state(part, state[name], layout)
            else:
                found[name] = {}, ["the checkpoint's state is not an optimizer's"]
    return found


def describe_misfits(
    parts: Mapping[str, Any],
    state: Mapping[str, Any],
    stages: Mapping[str, tuple[dict[str, Any], list[str]]],
    notes: OptimizerNotes,
) -> MismatchReport:
    """Report the entries of `state` that do not fit `parts`, before anything is loaded; `stages` is from `fit_stages`.

    `notes` describe the optimizers of the saved parts.
    """
    report = MismatchReport()
    here = parameter_orders(parts)
    for name, part in parts.items():
        if name not in state:
            report.missing.append(name)
        elif isinstance(part, nn.Module):
            _compare_module(name, part, state[name], report)
        elif isinstance(part, torch.optim.Optimizer):
            if other := find_other_class(name, part, notes.classes.get(name, "")):
                report.misshapen += other
            elif name in stages:
                report.misshapen += [f"{name}: {problem}" for problem in stages[name][1]]
            else:
                report.misshapen += find_misfits(name, part, state[name])
                report.misshapen += find_other_order(name, notes.orders.get(name, ()), here.get(name, ()))
    return report


def _compare_module(name: str, module: nn.Module, saved: Any, report: MismatchReport) -> None:
    if not isinstance(saved, Mapping):
        report.misshapen.append(f"{name}: a {type(saved).__name__} in the checkpoint, a module's state here")
        return
    mine = module_state(module)
    prefixes = wrapper_prefixes(module)
    theirs = _as_named_by(mine, saved, prefixes)
    names = dict.fromkeys(_state_keys(module))
    report.missing += [f"{name}.{key}" for key in names if key not in theirs]
    report.unexpected += [f"{name}.{key}" for key in theirs if key not in names]
    changed = _changed_by_hooks(module, prefixes)
    for key in mine:
        if key.startswith(changed):
            continue
        here, there = mine[key], theirs.get(key)
        if isinstance(here, Tensor) and isinstance(there, Tensor) and (words := _misfit(here, there)):
            report.misshapen.append(f"{name}.{key}: {words}")


def _changed_by_hooks(module: nn.Module, prefixes: Sequence[str]) -> tuple[str, ...]:
    """Return the name prefixes of modules whose shapes cannot be checked, because a user's hook may change the values.

    Our own hooks (DistributedDataParallel has one) change only names.
    """
    return tuple(
        unwrap_key(f"{name}." if name else "", prefixes)
        for name, inner in module.named_modules(remove_duplicate=False)
        if not all(_is_ours(hook) for hook in inner._load_state_dict_pre_hooks.values())
    )


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch may wrap the hook in an object
    return str(getattr(function, "__module__", "")).startswith("phalanx.")


def _misfit(here: Tensor, there: Tensor) -> str:
    """Describe why `here` cannot hold the values of `there`; "" if it can."""
    if not _is_lazy(here) and here.shape != there.shape:
        return f"{tuple(there.shape)} in the checkpoint, {tuple(here.shape)} here"
    if here.dtype == there.dtype or _can_hold(here.dtype, there):
        return ""
    theirs, mine = (str(dtype).removeprefix("torch.") for dtype in (there.dtype, here.dtype))
    return f"{theirs} in the checkpoint, {mine} here, which cannot hold its values"


def _can_hold(dtype: torch.dtype, values: Tensor) -> bool:
    """Return whether `dtype` can represent `values`; floating-point types may lose precision."""
    if not torch.can_cast(values.dtype, dtype):
        return False
    if dtype.is_floating_point or dtype.is_complex or values.dtype is torch.bool or values.numel() == 0:
        return True
    if is_dtensor(values) or values.is_meta:
        return torch.iinfo(values.dtype).max <= torch.iinfo(dtype).max
    limits, (least, most) = torch.iinfo(dtype), values.aminmax()
    return limits.min <= int(least) and int(most) <= limits.max


def _as_named_by(mine: Mapping[str, Any], saved: Mapping[str, Any], prefixes: Sequence[str]) -> Mapping[str, Any]:
    """Return `saved` with names as in `mine`: other programs save names with the prefixes of wrappers."""
    stripped = without_wrappers(saved, prefixes)
    return stripped if len(stripped.keys() & mine.keys()) > len(saved.keys() & mine.keys()) else saved


def _state_keys(module: nn.Module) -> list[str]:
    """Return the keys of `module_state`; if the model is split between ranks, the keys of all parts."""
    return module.state_names if isinstance(module, PartOwner) else list(module_state(module))


def _is_lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))


HALF_LOADED = "Some parts may have changed. Create them again before training continues."
"""The advice if a part raised while it was loaded."""


def load_part(part: Any, saved: Any, *, strict: bool) -> None:
    """Load the state of one part."""
    if isinstance(part, nn.Module):
        # Without the prefixes of wrappers, names do not depend on how the state was saved.
        prefixes = wrapper_prefixes(part)
        own: Mapping[str, Any] = {} if isinstance(part, PartOwner) else part.state_dict()
        keys = part.state_names if isinstance(part, PartOwner) else own
        names = {unwrap_key(key, prefixes): key for key in keys}
        plain = _as_named_by(names, saved, prefixes)
        mine = OrderedDict((names.get(key, key), value) for key, value in plain.items())
        mine = OrderedDict((key, _cut_like(own.get(key), value)) for key, value in mine.items())
        if not strict:
            mine = _that_fits(part, mine)
        if (versions := versions_of(plain)) is not None:
            set_versions(mine, versions_as_wrapped(versions, own, prefixes))
        part.load_state_dict(mine, strict=strict)
    elif isinstance(part, torch.optim.Optimizer):
        part.load_state_dict(_fit_optimizer_state(part, saved))
    else:
        part.load_state_dict(saved)


def _cut_like(mine: Any, value: Any) -> Any:
    """Return this rank's shard of `value` if `mine` is sharded. Not collective."""
    if not is_dtensor(mine) or not isinstance(value, Tensor) or is_dtensor(value) or value.shape != mine.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(mine.device), mine.device_mesh, mine.placements, src_data_rank=None)


def _fit_optimizer_state(optimizer: torch.optim.Optimizer, saved: Any) -> Any:
    """Return `saved` with the strides and shards of the parameters, which fused optimizers need."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    of = dict(zip(numbers, parameters, strict=True))
    fitting = {
        number: {key: _laid_out_like(of.get(number), _cut_like(of.get(number), value)) for key, value in state.items()}
        if isinstance(state, Mapping)
        else state
        for number, state in saved["state"].items()
    }
    return {**saved, "state": fitting}


def _laid_out_like(parameter: Any, value: Any) -> Any:
    strided = all(isinstance(one, Tensor) and one.layout is torch.strided for one in (parameter, value))
    if not strided or is_dtensor(parameter) or is_dtensor(value) or value.shape != parameter.shape:
        return value
    return value if same_order(value, parameter) else lay_out(value, find_strides(parameter))


def _that_fits(module: nn.Module, state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the values in `state` whose shape fits: load_state_dict refuses other shapes even if not strict."""
    mine = module_state(module) if isinstance(module, PartOwner) else module.state_dict()
    return OrderedDict(
        (key, value)
        for key, value in state.items()
        if key in mine and not (isinstance(value, Tensor) and _misfit(mine[key], value))
    )
