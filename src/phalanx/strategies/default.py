"""Report the strategy under which the current code runs, even if no strategy is in scope."""

from __future__ import annotations

import torch

from phalanx._comm.backend import Job
from phalanx.strategies.current import ReplicaContext, current_strategy
from phalanx.strategies.devices import default_device
from phalanx.strategies.single_device import SingleDeviceStrategy
from phalanx.strategies.strategy import Strategy


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
    """Return this replica's context, as in tf.distribute; if no strategy is in scope, the only replica's."""
    return ReplicaContext(get_strategy())
