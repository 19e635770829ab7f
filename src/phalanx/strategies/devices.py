"""Which devices a strategy asks for, and which of them is this rank's."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch


def decide_devices(called: str, devices: int | Sequence[str] | None) -> list[torch.device]:
    """The devices of one host: all GPUs, else one "cpu" for each core that this process may use.

    Raises:
        ValueError: none, a name that is no device, or kinds that differ.
    """
    gpus = torch.cuda.device_count()
    if devices is None:
        return [torch.device("cuda", i) for i in range(gpus)] or [torch.device("cpu")] * len(os.sched_getaffinity(0))
    if isinstance(devices, int):
        if devices < 1:
            raise ValueError(f"{called}: devices must be 1 or more, got {devices}")
        if 0 < gpus < devices:
            raise ValueError(f"{called}: {devices} devices are asked for, and this host has {gpus} GPUs")
        return [torch.device("cuda", i) for i in range(devices)] if gpus else [torch.device("cpu")] * devices
    try:
        named = [torch.device(one) for one in devices]
    except RuntimeError as error:
        raise ValueError(f"{called}: devices={list(devices)!r}: {str(error).splitlines()[0]}") from None
    if not named or len({one.type for one in named}) > 1:
        raise ValueError(f"{called}: devices must name one or more of one kind, got {list(devices)!r}")
    return named


def device_of(devices: Sequence[torch.device], local_rank: int) -> torch.device:
    """That of a rank; each core is "cpu" to torch."""
    one = devices[local_rank % len(devices)]
    if one.type == "cuda":
        torch.cuda.set_device(one)
        return one
    return torch.device("cpu")
