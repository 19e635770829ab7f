"""A group on a device that has no engine: tensors travel through the host."""

import pytest
import torch
from tests.backend.default_group import join_by_file

from phalanx._comm.backend import device_backends
from phalanx._comm.backend.device_backends import DeviceBackend, find_shared_gpu

CPU = torch.device("cpu")


def _of_float64(arguments):
    for argument in arguments[:2]:
        while isinstance(argument, (list, tuple)) and argument:
            argument = argument[0]
        if isinstance(argument, torch.Tensor):
            return CPU if argument.dtype == torch.float64 else None
    return None


def join_staged(rank, world_size, path, timeout_s=60.0):
    """A group whose float64 tensors no engine carries."""
    from phalanx._comm.backend.process_group import devices

    opened = None if world_size == 1 else lambda *_: pytest.fail("NCCL was asked")
    device_backends.DEVICE_BACKENDS["cpu"] = DeviceBackend(
        "NCCL", lambda: True, opened, lambda device: "GPU-7", find_shared_gpu
    )
    devices.find_device = _of_float64
    join_by_file(rank, world_size, path, timeout_s)
