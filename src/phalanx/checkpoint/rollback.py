"""`Rollback` remembers the parts of a training run, and puts them back if a load fails in a part or on another rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn


class Rollback:
    """`Rollback` remembers parts, restores them, and says which of them it could not restore.

    A part with a true `loads_all_or_nothing` is not asked for its state, which may be on other workers: its own
    `load_state_dict` changes nothing when it raises a ValueError. After another error it may hold a part of the state.

    Collective if ranks share the memory of parts (the parameters of a ZeroRedundancyOptimizer): all have to be
    remembered before any rank loads, and restored before any goes on.

    Cost: a copy of the parameters and buffers of models, in memory of the host, and of this rank's part of the state of
    a ZeroRedundancyOptimizer; nothing for torch's optimizers, whose `load_state_dict` makes a new state.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._steps: list[tuple[str, Callable[[], object]]] = []
        self._refuses_whole = {name for name, part in parts.items() if _loads_all_or_nothing(part)}
        self._not_copied = set(self._refuses_whole)
        self._begun: set[str] = set()
        for name, part in parts.items():
            try:
                for step in _remember(part):
                    self._steps.append((name, step))
            except Exception:  # it cannot return its state
                self._not_copied.add(name)

    @contextlib.contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Note that the part `name` is loaded while this is entered: a part that no load reached has not changed."""
        self._begun.add(name)
        try:
            yield
        except ValueError:
            if name in self._refuses_whole:
                self._begun.discard(name)
            raise

    def put_back(self) -> list[str]:
        """Restore the parts; return the names of those that may have changed all the same."""
        left = self._not_copied & self._begun
        for name, step in self._steps:
            try:
                step()
            except Exception:  # the error that led here is the one to raise
                left.add(name)
        return sorted(left)


def in_loading_order(parts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the parts by name; those that cannot be restored if another one fails come last."""
    return sorted(parts.items(), key=lambda item: _loads_all_or_nothing(item[1]))


def describe_put_back(left: Collection[str]) -> str:
    """Return in words what a load that failed has left, if the parts `left` could not be restored."""
    if not left:
        return "Nothing was loaded: all parts are as they were."
    names = ", ".join(map(repr, sorted(left)))
    return (
        f"These parts could not be put back and may have changed: {names}. The others are as they were. "
        "Build these parts again, or load a checkpoint that fits, before training goes on."
    )


def _loads_all_or_nothing(part: Any) -> bool:
    return bool(getattr(part, "loads_all_or_nothing", False))


def _remember(part: Any) -> Iterator[Callable[[], object]]:
    if isinstance(part, nn.Module):
        yield from _remember_module(part)
    elif isinstance(part, torch.optim.Optimizer):
        inner = getattr(part, "optim", None)  # the optimizer inside a ZeroRedundancyOptimizer
        optimizers = [part, inner] if isinstance(inner, torch.optim.Optimizer) else [part]
        yield from [_remember_attributes(optimizer) for optimizer in optimizers]
        # the optimizer is ours, which loads into the state that it has, and into masters
        if hasattr(part, "load_shard"):
            sharded: Any = part
            shard = _cloned(sharded.shard_state_dict()["state"])
            yield lambda: sharded.load_shard(shard)
    elif hasattr(part, "state_dict") and not _loads_all_or_nothing(part):
        yield _remember_attributes(part)
        state = deepcopy(part.state_dict())
        yield lambda: part.load_state_dict(state)


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return {key: _cloned(item) for key, item in value.items()} if isinstance(value, dict) else value


def _remember_attributes(part: Any) -> Callable[[], object]:
    if not hasattr(part, "__dict__"):
        return lambda: None
    before = dict(vars(part))
    groups = [(group, dict(group)) for group in before.get("param_groups", ())]

    def put_back() -> None:
        vars(part).clear()
        vars(part).update(before)
        for group, options in groups:
            group.clear()
            group.update(options)

    return put_back


def _remember_module(module: nn.Module) -> Iterator[Callable[[], object]]:
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if not _has_no_memory(tensor)]
    copies = [(tensor, tensor.detach().clone() if _stays(tensor) else tensor.detach().cpu()) for tensor in tensors]

    def put_back() -> None:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)

    yield put_back
    for inner in module.modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            extra = deepcopy(inner.get_extra_state())
            yield lambda inner=inner, extra=extra: inner.set_extra_state(extra)  # type: ignore[misc]


def _stays(tensor: Tensor) -> bool:
    """Return whether a tensor's copy is made in its own place: on the CPU, or as a shard of several ranks."""
    return tensor.device.type == "cpu" or type(tensor) not in (Tensor, nn.Parameter)


def _has_no_memory(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))
