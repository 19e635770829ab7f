"""Open NCCL, from PyTorch's CUDA builds, for tensors in GPU memory, on one or several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx._comm.diagnostics.rank_list import name_ranks

c10d: Any = dist.distributed_c10d  # its stubs lack names used here

_ProcessGroup: Any = dist.ProcessGroup  # torch's stub has only some of the class's methods


def is_available() -> bool:
    """Return whether this build of PyTorch has NCCL, and this process has a GPU for it."""
    return dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()


def open_nccl(
    store: Any, rank: int, world_size: int, timeout: timedelta, name: str, global_ranks: Sequence[int]
) -> Any:
    """Return a process group of torch's with NCCL for CUDA tensors. It sends nothing until it is first used."""
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
    """Return one of torch's backends as a process group for tensors on `device`, as `init_process_group` makes them."""
    group = _ProcessGroup(store, rank, world_size)
    backend_type = getattr(_ProcessGroup.BackendType, kind.upper())
    group._set_default_backend(backend_type)
    group._register_backend(device, backend_type, backend)
    group._set_group_name(name)
    return group


def identify(device: torch.device) -> str:
    """Return an identifier of a GPU, independent of its number in this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def find_shared_gpu(gpus: Sequence[str]) -> str:
    """Return why NCCL cannot connect ranks that use these GPUs, by rank, or ""."""
    users: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        users.setdefault(gpu, []).append(rank)
    shared = [f"{name_ranks(ranks)} use {gpu}" for gpu, ranks in users.items() if len(ranks) > 1]
    if not shared:
        return ""
    return f"{'; '.join(shared)}, and NCCL takes one rank per GPU."
