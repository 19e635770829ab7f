"""Decide how many replicas there are, by PyTorch's arguments, where the devices are threads on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

CPU = torch.device("cpu")

DeviceId = int | str | torch.device


def decide_replicas(device_ids: int | Sequence[DeviceId] | None, num_threads: int) -> list[torch.device]:
    """Return one CPU device per replica: as many as `device_ids` says, or names; one per intra-op thread if it is None.

    Numbers are PyTorch's names for accelerators. On a machine without one, each stands for one more replica.

    Raises:
        ValueError: there would be no replica, or a device is not the CPU.
    """
    if device_ids is None:
        return [CPU] * num_threads
    if isinstance(device_ids, int):
        if device_ids < 1:
            raise ValueError(f"DataParallel: device_ids={device_ids} replicas; it takes 1 or more")
        return [CPU] * device_ids
    if not device_ids:
        raise ValueError("DataParallel: device_ids names no device; leave it out, or name one per replica")
    for device_id in device_ids:
        _check_cpu("device_ids", device_id)
    return [CPU] * len(device_ids)


def check_output_device(output_device: DeviceId | None) -> None:
    """Refuse an output device that is not the CPU, where replicas are threads.

    Raises:
        ValueError: it is another device.
    """
    if output_device is not None:
        _check_cpu("output_device", output_device)


def name_accelerators(device_ids: int | Sequence[DeviceId] | None, output_device: DeviceId | None) -> bool:
    """Return whether the arguments mean accelerators, on a machine with one: all do but those that name the CPU."""
    if isinstance(device_ids, int):
        return False  # a number of replicas, which is not in PyTorch's interface
    named = [*(device_ids or ()), *(() if output_device is None else (output_device,))]
    kinds = {"cpu" if not isinstance(one, int) and torch.device(one).type == "cpu" else "other" for one in named}
    if len(kinds) > 1 and device_ids and _is_cpu(device_ids[0]):
        raise ValueError(f"DataParallel: replicas are all on the CPU or all on accelerators, got {named}")
    return not device_ids or not _is_cpu(device_ids[0])


def _is_cpu(device_id: DeviceId) -> bool:
    return not isinstance(device_id, int) and torch.device(device_id).type == "cpu"


def _check_cpu(argument: str, device_id: DeviceId) -> None:
    if not isinstance(device_id, int) and not _is_cpu(device_id):
        raise ValueError(
            f"DataParallel: {argument} names {torch.device(device_id)}, but this machine has no accelerator that "
            'PyTorch can use. Replicas on the CPU are named "cpu", once for each.'
        )
