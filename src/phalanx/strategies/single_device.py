"""`SingleDeviceStrategy` trains in one process, on one device."""

from __future__ import annotations

import os

import torch

from phalanx._comm import backend
from phalanx._comm.backend import Job
from phalanx.strategies.devices import default_device, read_device
from phalanx.strategies.start import is_launched
from phalanx.strategies.strategy import Strategy


class SingleDeviceStrategy(Strategy):
    """Train in this process alone, on `device`, as a script without strategies does.

    Arguments:
        device: by default the first GPU, else the CPU.

    Raises:
        ValueError: the process was launched as one of several ranks, or the device does not exist.
    """

    name = "single_device"

    def __init__(self, device: torch.device | str | None = None) -> None:
        job = Job(0, 1, 0, torch.device("cpu"))
        if is_launched(os.environ):  # otherwise: a job of one rank needs no process group
            job = backend.init()
        if job.world_size > 1:
            raise ValueError(
                f"SingleDeviceStrategy: this is rank {job.rank} of {job.world_size}: start the script with `python`, "
                "or take another strategy"
            )
        super().__init__(job, num_replicas=1, replica=0)
        self.device = default_device() if device is None else read_device(self._called, device)


OneDeviceStrategy = SingleDeviceStrategy
"""The name of a SingleDeviceStrategy in tf.distribute."""
