"""Decide which devices a strategy uses, and which device belongs to this rank."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from phalanx._base.control_groups import count_cores


def decide_devices(called: str, devices: int | Sequence[str] | None) -> list[torch.device]:
    """Return the requested devices; None requests all GPUs, or without GPUs one "cpu" per core that may be used.

    A control group's CPU quota limits the number of cores.

    Raises:
        TypeError: `devices` is neither a number nor a list of names.
        ValueError: no device is requested, some device does not exist, or device types differ.
    """
    gpus = torch.cuda.device_count()
    if devices is None:
        cores = count_cores(len(os.sched_getaffinity(0)))
        return [torch.device("cuda", i) for i in range(gpus)] or [torch.device("cpu")] * cores
    if isinstance(devices, int) and not isinstance(devices, bool):
        if devices < 1:
            raise ValueError(f"{called}: devices must be 1 or more, got {devices}")
        if 0 < gpus < devices:
            raise ValueError(f"{called}: {devices} devices were requested, but this host has {gpus} GPUs")
        return [torch.device("cuda", i) for i in range(devices)] if gpus else [torch.device("cpu")] * devices
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"{called}: devices must be a number, or a list of names such as ['cuda:0'], got {devices!r}")
    named = [read_device(f"{called}: devices={list(devices)!r}", one) for one in devices]
    if not named or len({one.type for one in named}) > 1:
        raise ValueError(f"{called}: devices must name one or more devices of the same type, got {list(devices)!r}")
    return named


def read_device(called: str, name: torch.device | str) -> torch.device:
    """Return the device of this name.

    Raises:
        ValueError: the name is not that of a CPU or CUDA device, or this host has no such device.
    """
    try:
        one = torch.device(name)
    except (RuntimeError, TypeError) as error:
        problem = str(error).splitlines()[0]
        if isinstance(name, str) and name.lower().lstrip("/").startswith("gpu"):
            problem = "PyTorch's name of a GPU is 'cuda:0'"
        raise ValueError(f"{called}: device {name!r}: {problem}") from None
    if one.type not in ("cpu", "cuda"):
        raise ValueError(f"{called}: device {str(name)!r}: strategies train on 'cpu' and on 'cuda'")
    gpus = torch.cuda.device_count()
    if one.type == "cuda" and (one.index or 0) >= gpus:
        raise ValueError(f"{called}: device {str(name)!r} does not exist: this host has {gpus or 'no'} GPUs")
    return one


def default_device() -> torch.device:
    """Return the device of a process that runs alone."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_of(devices: Sequence[torch.device], local_rank: int) -> torch.device:
    """Return the device of a local rank; if it is a GPU, make it the current device."""
    one = devices[local_rank % len(devices)]
    if one.type == "cuda":
        torch.cuda.set_device(one)
        return one
    return torch.device("cpu")
