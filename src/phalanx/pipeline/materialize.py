"""Allocate memory for a stage whose model was built on the meta device, where tensors have none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def materialize(own: nn.Module, device: torch.device, init_fn: Callable[[str, Tensor], object] | None) -> list[str]:
    """Give every meta tensor of `own` memory and values: those of its module's `reset_parameters`, or of `init_fn`.

    Tensors that two modules share stay shared. It returns the names of those that got no values; they are zero.
    """
    new: dict[int, Tensor] = {}
    made: dict[str, nn.Module] = {}
    for path, module in own.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in new:
                    data = torch.zeros_like(tensor, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    new[id(tensor)] = nn.Parameter(data, tensor.requires_grad) if is_parameter else data
                tensors[name] = new[id(tensor)]
                made[f"{path}.{name}" if path else name] = module
    for module in dict.fromkeys(made.values()):
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    left = [name for name, module in made.items() if not callable(getattr(module, "reset_parameters", None))]
    if init_fn is not None:
        with torch.no_grad():
            for name in left:
                owner, _, last = name.rpartition(".")
                init_fn(name, getattr(own.get_submodule(owner), last))
        return []
    return left
