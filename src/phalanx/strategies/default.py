"""Tell which strategy the code at hand runs under, also where no strategy is in scope."""

from __future__ import annotations

import torch

from phalanx._comm.backend import Job
from phalanx.strategies.current import ReplicaContext, current_strategy
from phalanx.strategies.devices import default_device
from phalanx.strategies.single_device import SingleDeviceStrategy
from phalanx.strategies.strategy import Strategy


class DefaultStrategy(SingleDeviceStrategy):
    """`get_strategy` returns it where no strategy is in scope: it is this process alone, even one of several."""

    def __init__(self) -> None:
        Strategy.__init__(self, Job(0, 1, 0, torch.device("cpu")), num_replicas=1, replica=0)
        self.device = default_device()

    @property
    def training_group(self) -> None:
        """Return None: this process trains alone."""
        return None


def get_strategy() -> Strategy:
    """Return the strategy in whose `scope` or `run` this runs.

    If it runs in none, return one of this process alone, as in tf.distribute, so that a function that asks for it runs
    with and without a strategy. `has_strategy()` tells the two apart.
    """
    return current_strategy() or DefaultStrategy()


def get_replica_context() -> ReplicaContext:
    """Return this replica, by the name of tf.distribute; where no strategy is in scope, the only one."""
    return ReplicaContext(get_strategy())
