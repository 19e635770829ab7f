"""Distributed optimizers: over parameters that a host's ranks share, over replicas that train apart, and over RPC."""

from phalanx.optim.diloco import DiLoCo
from phalanx.optim.distributed import DistributedOptimizer
from phalanx.optim.local_sgd import LocalSGD
from phalanx.optim.state import merge_state_dicts
from phalanx.optim.zero import ZeroRedundancyOptimizer

__all__ = [
    "DiLoCo",
    "DistributedOptimizer",
    "LocalSGD",
    "ZeroRedundancyOptimizer",
    "merge_state_dicts",
]
