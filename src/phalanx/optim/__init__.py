"""These are optimizers over many ranks: of parameters shared on a host, of replicas, and of remote parameters."""

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
