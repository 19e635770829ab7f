"""`SingleDeviceStrategy` trains in one process, on one device, as does a script without a strategy."""

from __future__ import annotations

import os

import torch

from phalanx._comm import backend
from phalanx._comm.backend import Job
from phalanx.strategies.current import ReplicaContext, current_strategy
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
        if is_launched(os.environ):  # without a launcher, this process is alone and needs no process group
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


class DefaultStrategy(SingleDeviceStrategy):
    """`DefaultStrategy` is the result of `get_strategy` if no strategy is in scope: this process trains alone."""

    def __init__(self) -> None:
        Strategy.__init__(self, Job(0, 1, 0, torch.device("cpu")), num_replicas=1, replica=0)
        self.device = default_device()

    @property
    def training_group(self) -> None:
        """Return None: this process trains alone."""
        return None


def get_strategy() -> Strategy:
    """Return the strategy in whose `scope` or `run` the caller runs.

    Outside of both, return a strategy of this process alone, as in tf.distribute, so that the same function works with
    and without a strategy. `has_strategy()` distinguishes the two.
    """
    return current_strategy() or DefaultStrategy()


def get_replica_context() -> ReplicaContext:
    """Return this replica's context, as in tf.distribute. Without a strategy in scope, there is one replica."""
    return ReplicaContext(get_strategy())
