"""The engines for tensors of each type of device; this backend itself handles CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx._comm.engines import nccl


@dataclass(frozen=True)
class DeviceBackend:
    """A `DeviceBackend` is an engine for the tensors of one type of device.

    `open(store, rank, world_size, timeout, name, global_ranks)` returns one of torch's process groups. `open` is None
    if torch has none for the device; then tensors go through host memory. `identify` returns an identifier of a device
    that is valid on all ranks. `obstacle` receives the identifiers of all ranks' devices, by rank, and returns why the
    engine cannot connect ranks that use these devices, or "".
    """

    engine: str
    is_available: Callable[[], bool]
    open: Callable[..., Any] | None
    identify: Callable[[torch.device], str]
    obstacle: Callable[[Sequence[str]], str]


DEVICE_BACKENDS = {
    "cuda": DeviceBackend("NCCL", nccl.is_available, nccl.open_nccl, nccl.identify, nccl.find_shared_gpu)
}


def available() -> dict[str, DeviceBackend]:
    """Return the backends that work in this process, by type of device."""
    return {
        device: device_backend for device, device_backend in DEVICE_BACKENDS.items() if device_backend.is_available()
    }


def first_tensor(arguments: Sequence[Any]) -> Tensor | None:
    """Return the first tensor among a collective's outputs and inputs, or None."""
    for argument in arguments[:2]:
        while isinstance(argument, (list, tuple)) and argument:
            argument = argument[0]
        if isinstance(argument, Tensor):
            return argument
    return None


def find_device(arguments: Sequence[Any]) -> torch.device | None:
    """Return the device of the first tensor among a collective's outputs and inputs; None for the CPU, or none."""
    tensor = first_tensor(arguments)
    return None if tensor is None or tensor.is_cpu else tensor.device


def no_backend_for(device: torch.device, operation: str, other: torch.device | None = None) -> str:
    """Return the error for a tensor on a device that no engine supports, with alternatives; `other` is the device of
    another tensor of the call.
    """
    device_backend = DEVICE_BACKENDS.get(device.type)
    here = f"{operation}: the tensor is on {device}; "
    if device_backend is None:
        return (
            f"{here}backend 'phalanx' carries CPU tensors, and CUDA tensors through NCCL.\n"
            f"Move it with .cpu(), or make a group whose backend carries {device.type} tensors: new_group(backend=...)."
        )
    if device_backend.is_available():
        where = "the CPU" if other is None or other.type == "cpu" else str(other)
        return f"{here}others of the same call are on {where}.\nPut all tensors of one call on one device."
    return (
        f"{here}{device_backend.engine} would carry it, but this PyTorch ({torch.__version__}) has none, "
        "or sees no device.\n"
        "Move it with .cpu(), which backend 'phalanx' carries itself, or install a build of PyTorch with "
        f"{device_backend.engine}."
    )
