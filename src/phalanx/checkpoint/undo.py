"""Parts of a training run as they were before a load, in case that it fails in one of them, or on another rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn


class Undo:
    """Remembers parts, and puts them back.

    A part with a true `loads_all_or_nothing` is not asked for its state, which may be on other workers: its own
    `load_state_dict` changes nothing when it fails.

    Cost: a copy of the parameters and buffers of models, in memory of the host; nothing for torch's optimizers, whose
    `load_state_dict` makes a new state.
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        self._steps: list[Callable[[], object]] = []
        for part in parts:
            with contextlib.suppress(Exception):  # one that cannot say what it is
                self._steps += _remember(part)

    def put_back(self) -> None:
        """Make all parts what they were."""
        for step in self._steps:
            with contextlib.suppress(Exception):  # the error that led here is the one to tell
                step()


def _remember(part: Any) -> list[Callable[[], object]]:
    if isinstance(part, nn.Module):
        return _remember_module(part)
    if isinstance(part, torch.optim.Optimizer):
        inner = getattr(part, "optim", None)  # of a ZeroRedundancyOptimizer
        optimizers = [part, inner] if isinstance(inner, torch.optim.Optimizer) else [part]
        return [_remember_attributes(optimizer) for optimizer in optimizers]
    if not hasattr(part, "state_dict") or getattr(part, "loads_all_or_nothing", False):
        return []
    state = deepcopy(part.state_dict())
    return [_remember_attributes(part), lambda: part.load_state_dict(state)]


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


def _remember_module(module: nn.Module) -> list[Callable[[], object]]:
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if not _has_no_memory(tensor)]
    copies = [(tensor, tensor.detach().clone() if _stays(tensor) else tensor.detach().cpu()) for tensor in tensors]

    def put_back() -> None:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)

    steps: list[Callable[[], object]] = [put_back]
    for inner in module.modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            extra = deepcopy(inner.get_extra_state())
            steps.append(lambda inner=inner, extra=extra: inner.set_extra_state(extra))  # type: ignore[misc]
    return steps


def _stays(tensor: Tensor) -> bool:
    """Whether its copy is made where it is: on the CPU, or a shard of a tensor of several ranks."""
    return tensor.device.type == "cpu" or type(tensor) not in (Tensor, nn.Parameter)


def _has_no_memory(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))
