"""Check PyTorch's arguments: some have a meaning here, and the others are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from phalanx._base.torch_names import find
from phalanx.ddp.plan import DEFAULT_CAP_MB, FIRST_CAP_MB

_REFUSED = {
    "delay_all_reduce_named_params": "it belongs to PyTorch's internal use; leave parameters out by freezing them",
    "param_to_hook_all_reduce": "it belongs to PyTorch's internal use",
    "mixed_precision": "use torch.autocast around forward, and the hook bf16_compress_hook to send fewer bytes",
    "skip_all_reduce_unused_params": "whole buckets travel; parameters that are never used are better frozen",
}

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
# These hooks of PyTorch's, by their module, can't work here, or nobody can use them on this backend.
_REFUSED_HOOKS = {
    _HOOKS + "mixed_precision_hooks": "it is a part of PyTorch's own DistributedDataParallel(mixed_precision=...). "
    "Use torch.autocast around forward, and bf16_compress_hook to send fewer bytes",
    _HOOKS + "ddp_zero_hook": "it looks into PyTorch's own reducer, to hide the time of a broadcast. Use "
    "phalanx.ZeroRedundancyOptimizer without it: on one host it broadcasts nothing",
    _HOOKS + "optimizer_overlap_hooks": "it steps optimizers inside backward, through PyTorch's own reducer. Call the "
    "optimizer's step() after backward",
}
_NEEDS_NCCL = {
    _HOOKS + "quantization_hooks": "it takes all_gather's future apart as NCCL lays it out, and fails on every other "
    "backend, with PyTorch's DistributedDataParallel too. Use bf16_compress_hook on Gloo, and on 'phalanx' "
    "phalanx.Options(wire_dtype=torch.bfloat16)",
}
_RESIZES = {
    "batched_powerSGD_hook": "it resizes the bucket, whose memory can't grow. Use powerSGD_hook",
}


def refuse_hook(hook: Callable[..., Any], backend: str) -> None:
    """Refuse those of PyTorch's communication hooks that can't work here, before a backward fails in them.

    Raises:
        TypeError: `hook` is no function.
        ValueError: `hook` is one of those; the message says what to use.
    """
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable, got {type(hook).__name__}")
    plain = getattr(hook, "func", hook)  # PyTorch hands out one of them as a functools.partial
    module, name = getattr(plain, "__module__", "") or "", getattr(plain, "__name__", repr(plain))
    reason = _REFUSED_HOOKS.get(module)
    if reason is None and backend != "nccl":
        reason = _NEEDS_NCCL.get(module)
    if reason is None and module == _HOOKS + "powerSGD_hook":
        reason = _RESIZES.get(name)
    if reason is not None:
        raise ValueError(f"DistributedDataParallel does not support the communication hook {name}: {reason}")


def refuse(**given: object) -> None:
    """Refuse each argument that was `given` a value, all in one message.

    Raises:
        ValueError: at least one was given.
    """
    reasons = [f"{name}: {_REFUSED[name]}" for name, value in given.items() if value]
    if reasons:
        raise ValueError("DistributedDataParallel does not support " + "; ".join(reasons))


def decide_caps(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> tuple[float, ...]:
    """Return the caps of the first, second, ... bucket in MiB; the last one serves all that follow.

    Raises:
        ValueError: a cap is not above zero.
    """
    caps: tuple[float, ...]
    if bucket_cap_mb_list:
        caps = tuple(bucket_cap_mb_list)
    elif bucket_cap_mb is None:
        caps = (FIRST_CAP_MB, DEFAULT_CAP_MB)
    else:
        caps = (bucket_cap_mb,)
    if any(not cap > 0 for cap in caps):
        raise ValueError(f"bucket_cap_mb must be above 0 MiB, got {caps[0] if len(caps) == 1 else caps}")
    return caps


def decide_group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """Return the group to average over: the given one, the mesh's, or the default group.

    Raises:
        ValueError: both are given, or the mesh has not one axis.
        RuntimeError: there is no default group.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("DistributedDataParallel takes process_group or device_mesh, not both")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ValueError(f"DistributedDataParallel takes a device_mesh of one axis, got one of {device_mesh.ndim}")
        return device_mesh.get_group(0)
    if process_group is not None:
        return process_group
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise RuntimeError(
            "DistributedDataParallel needs a process group: call phalanx.init() or "
            "torch.distributed.init_process_group() before wrapping the module"
        )
    return dist.group.WORLD


def localize(module: nn.Module, device_mesh: DeviceMesh) -> None:
    """Replace parameters that are DTensors by their local parts between forwards, as PyTorch's wrapper does.

    It does so where the mesh is an axis of a larger one, whose other axes carry tensor parallelism.
    """
    if device_mesh._get_root_mesh() != device_mesh:
        transform: Any = find(
            "torch.distributed.tensor.parallel.ddp._pre_dp_module_transform",
            loses="DistributedDataParallel does not train tensor-parallel models",
        )
        transform(module)


def decide_device(
    devices: set[torch.device],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> torch.device | None:
    """Return the device that inputs are moved to; None leaves them where they are.

    Raises:
        ValueError: the module spans devices, or `device_ids` says something else than the parameters.
    """
    if len(devices) > 1:
        where = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"DistributedDataParallel takes a module on one device, this one lies on {where}. Give each rank one "
            "device; to split a model over several, use pipelining"
        )
    (device,) = devices
    if not device_ids:
        if output_device is not None:
            raise ValueError(
                f"output_device={output_device} without device_ids: outputs stay where the module is, {device}"
            )
        return None
    if device.type == "cpu" or len(device_ids) > 1:
        raise ValueError(
            f"device_ids={list(device_ids)}: must be None for a module on the CPU, and else a list of the one "
            f"device that the module is on, here {device}"
        )
    wanted = [torch.device(device.type, one) if isinstance(one, int) else torch.device(one) for one in device_ids]
    if output_device is not None:
        wanted.append(
            torch.device(device.type, output_device) if isinstance(output_device, int) else torch.device(output_device)
        )
    if any(one != device for one in wanted):
        raise ValueError(f"device_ids and output_device must name the module's device {device}, got {wanted}")
    return device
