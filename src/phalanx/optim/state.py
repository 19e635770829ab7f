"""Cut optimizer state into shards, and merge shards into the whole state. All functions are pure.

A whole state is a plain optimizer's `state_dict`. A shard is a part of it, as plain data for `torch.save`:

    param_groups   as in the whole state
    state          parameter number -> start and stop, in elements in memory order, and the state of that slice
    layout         parameter number -> its shape and strides
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from phalanx._comm.transport.tensors import same_order
from phalanx.optim.parameter_shard import in_memory_order

State = dict[str, Any]
StateDict = dict[str, Any]


def merge_state_dicts(shards: Sequence[Mapping[str, Any]]) -> StateDict:
    """Merge the shards of all ranks, in any order, into the whole state: the plain optimizer's `state_dict`.

    If several hosts each have all shards, the shards of one host are enough.

    Raises:
        ValueError: the shards do not fit together, or some are missing; the message says for which parameter.
    """
    if not shards:
        raise ValueError("merge_state_dicts needs the shard of every rank, got none")
    layout = shards[0]["layout"]
    if any(_orders(shard["layout"]) != _orders(layout) for shard in shards):
        raise ValueError("merge_state_dicts: the shards are of different models: their parameters' shapes differ")
    state = {}
    for number, (shape, stride) in layout.items():
        slices = {(part["start"], part["stop"]): part for s in shards if (part := s["state"].get(number)) is not None}
        parts = [slices[bounds] for bounds in sorted(slices)]  # each of several hosts has all of them
        if parts:
            state[number] = _merge(number, parts, tuple(shape), tuple(stride))
    groups = [{key: value for key, value in group.items()} for group in shards[0]["param_groups"]]
    return {"state": state, "param_groups": groups}


def layout_of(parameters: Iterable[Tensor]) -> dict[int, Any]:
    """Return the shape and strides of each parameter, by number, for the `layout` of a shard."""
    return {number: (tuple(p.shape), tuple(p.stride())) for number, p in enumerate(parameters)}


def merge_states(states: Sequence[Mapping[int, Any]], parameters: Iterable[Tensor]) -> dict[int, Any]:
    """Merge the states of the shards of all ranks into the whole state."""
    layout = layout_of(parameters)
    merged = merge_state_dicts([{"layout": layout, "state": state, "param_groups": []} for state in states])
    return dict(merged["state"])


def _orders(layout: Mapping[int, Any]) -> dict[int, Any]:
    """Return the shapes, and the strides of dimensions with more than one element; other strides do not matter."""
    return {
        number: (shape, [step for n, step in zip(shape, stride, strict=True) if n != 1])
        for number, (shape, stride) in layout.items()
    }


def refuse_state_without_parameter(state: Mapping[Any, Any], optimizer_class: type[Optimizer], known: int) -> None:
    """Refuse state that belongs to no parameter: each rank has its own copy, and the copies cannot be merged.

    `known` is the number of parameters with state.

    Raises:
        ValueError: there is such state.
    """
    if len(state) == known:
        return
    if loose := [key for key in state if not isinstance(key, Tensor)]:
        raise ValueError(
            f"ZeroRedundancyOptimizer: {optimizer_class.__name__} keeps state[{loose[0]!r}], which belongs to no "
            "parameter. Each rank would have its own value, which no checkpoint holds. "
            f"Keep the value in the state of each parameter, or use {optimizer_class.__name__} itself."
        )


def _merge(number: int, parts: Sequence[Mapping[str, Any]], shape: tuple[int, ...], stride: tuple[int, ...]) -> State:
    numel = torch.Size(shape).numel()
    at = 0
    for part in parts:
        if part["start"] != at:
            break
        at = part["stop"]
    if at != numel:
        have = ", ".join(f"{part['start']} to {part['stop']}" for part in parts)
        raise ValueError(
            f"merge_state_dicts: parameter {number} has {numel} elements, but the shards have state for {have}. "
            "Pass each rank's shard once, all from the same step."
        )
    if len(parts) == 1:
        return dict(parts[0]["state"])
    whole: State = {}
    for key, value in parts[0]["state"].items():
        if not _is_per_element(value, parts[0]):
            whole[key] = value
            continue
        assembled = torch.empty_strided(shape, stride, dtype=value.dtype, device="cpu")
        flat = assembled.as_strided((numel,), (1,))
        for part in parts:
            flat[part["start"] : part["stop"]] = part["state"][key]
        whole[key] = assembled
    return whole


def _is_per_element(value: object, part: Mapping[str, Any]) -> bool:
    """Return whether a value has an element for each element of the slice, unlike a counter."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == part["stop"] - part["start"]


def cut_state(whole: State, parameter: Tensor, start: int, stop: int) -> State:
    """Return a copy of the state of one slice of a parameter."""
    state: State = {}
    for key, value in whole.items():
        if not isinstance(value, Tensor):
            state[key] = value
        elif stop - start < parameter.numel() and value.shape == parameter.shape:
            state[key] = in_memory_order(value, parameter)[start:stop].clone()
        elif value.shape == parameter.shape and not same_order(value, parameter):
            # Fused kernels ignore strides, so state must have the parameter's.
            state[key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
        else:
            state[key] = value.clone()
    return state
