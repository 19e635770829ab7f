"""Move parameters and buffers to their devices. A tensor that several modules have stays one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.torch_names import find

_may_take_place: Any = find(
    "torch._has_compatible_shallow_copy_type",
    loses="a layer that is moved to a device gets new parameters",
    instead=lambda parameter, data: False,
)


def move(module: nn.Module, devices: Mapping[int, torch.device]) -> None:
    """Move each parameter and buffer, by its `id`, to its device; those that are not named stay where they are.

    A Parameter stays the same object, with its gradient, where PyTorch can change its memory; to the meta device and
    from it, it is a new one, in every module that had it.
    """
    moved: dict[int, Tensor] = {}
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None and (device := devices.get(id(parameter))) is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = _move_parameter(parameter, device)
                owner._parameters[name] = moved[id(parameter)]  # type: ignore[assignment]
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None and (device := devices.get(id(buffer))) is not None:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                owner._buffers[name] = moved[id(buffer)]


def _move_parameter(parameter: nn.Parameter, device: torch.device) -> Tensor:
    if parameter.device == device:
        return parameter
    data = parameter.data.to(device)
    if not _may_take_place(parameter.data, data):
        return nn.Parameter(data, parameter.requires_grad)
    gradient = parameter.grad
    parameter.data = data
    if gradient is not None:
        parameter.grad = gradient.to(device)
    return parameter
