"""List the engine for each type of device, such as NCCL for CUDA; this backend itself handles CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._comm.diagnostics.rank_list import name_ranks

c10d: Any = dist.distributed_c10d  # its stubs lack names used here
_ProcessGroup: Any = dist.ProcessGroup  # torch's stub has only some of the class's methods


@dataclass(frozen=True)
class DeviceBackend:
    """A `DeviceBackend` is an engine for the tensors of one type of device.

    `open(store, rank, world_size, timeout, name, global_ranks)` returns one of torch's process groups. `open` is None
    if torch has none for the device; then tensors go through host memory. `identify` returns a device's identifier,
    which is the same on all ranks. `obstacle` receives the identifiers of all ranks' devices, by rank, and returns why
    the engine cannot connect ranks that use these devices, or "".
    """

    engine: str
    is_available: Callable[[], bool]
    open: Callable[..., Any] | None
    identify: Callable[[torch.device], str]
    obstacle: Callable[[Sequence[str]], str]


def is_nccl_available() -> bool:
    """Return whether this build of PyTorch has NCCL, and this process has a GPU for it."""
    return dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()


def _open_nccl(
    store: Any, rank: int, world_size: int, timeout: timedelta, name: str, global_ranks: Sequence[int]
) -> Any:
    """Return one of torch's process groups, with NCCL for CUDA tensors. It sends nothing until it is first used."""
    nccl: Any = vars(c10d)["ProcessGroupNCCL"]  # a CPU build does not have it
    options = nccl.Options()
    options._timeout = timeout
    options.group_name = name
    options.global_ranks_in_group = list(global_ranks)
    store = c10d.PrefixStore("nccl", store)
    backend = nccl(store, rank, world_size, options)
    backend._set_sequence_number_for_group()
    return group_of(backend, "nccl", torch.device("cuda"), store, rank, world_size, name)


def group_of(backend: Any, kind: str, device: torch.device, store: Any, rank: int, world_size: int, name: str) -> Any:
    """Wrap one of torch's backends in a process group for tensors on `device`, as `init_process_group` does."""
    group = _ProcessGroup(store, rank, world_size)
    backend_type = getattr(_ProcessGroup.BackendType, kind.upper())
    group._set_default_backend(backend_type)
    group._register_backend(device, backend_type, backend)
    group._set_group_name(name)
    return group


def _identify(device: torch.device) -> str:
    """Return an identifier of a GPU that does not depend on its index in this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def find_shared_gpu(gpus: Sequence[str]) -> str:
    """Return why NCCL cannot connect the ranks, or ""; `gpus` has each rank's GPU, by rank."""
    users: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        users.setdefault(gpu, []).append(rank)
    shared = [f"{name_ranks(ranks)} use {gpu}" for gpu, ranks in users.items() if len(ranks) > 1]
    if not shared:
        return ""
    return f"{'; '.join(shared)}, but NCCL supports only one rank per GPU."


DEVICE_BACKENDS = {"cuda": DeviceBackend("NCCL", is_nccl_available, _open_nccl, _identify, find_shared_gpu)}


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
    """Return the device of a collective's first tensor (outputs, then inputs); None for the CPU, or if none exists."""
    tensor = first_tensor(arguments)
    return None if tensor is None or tensor.is_cpu else tensor.device


def no_backend_for(device: torch.device, operation: str, other: torch.device | None = None) -> str:
    """Return the error message, with alternatives, for a tensor on a device that no engine supports.

    `other` is the device of another tensor of the call.
    """
    device_backend = DEVICE_BACKENDS.get(device.type)
    here = f"{operation}: the tensor is on {device}; "
    if device_backend is None:
        return (
            f"{here}backend 'phalanx' supports CPU tensors, and CUDA tensors through NCCL.\n"
            f"Move the tensor with .cpu(), or create a group whose backend supports {device.type} tensors: "
            "new_group(backend=...)."
        )
    if device_backend.is_available():
        where = "the CPU" if other is None or other.type == "cpu" else str(other)
        return f"{here}other tensors of the call are on {where}.\nPut all tensors of one call on one device."
    return (
        f"{here}it needs {device_backend.engine}, but this PyTorch ({torch.__version__}) lacks "
        f"{device_backend.engine} or finds no device.\n"
        "Move the tensor with .cpu(), or install a build of PyTorch with "
        f"{device_backend.engine}."
    )
