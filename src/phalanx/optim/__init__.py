"""Optimizers over many ranks: of parameters that exist once per host, of replicas that train apart, of remote ones."""

from phalanx.optim.averager import PeriodicModelAverager
from phalanx.optim.diloco import DiLoCo
from phalanx.optim.distributed import DistributedOptimizer
from phalanx.optim.local_sgd import LocalSGD
from phalanx.optim.state import merge_state_dicts
from phalanx.optim.zero import ZeroRedundancyOptimizer

__all__ = [
    "DiLoCo",
    "DistributedOptimizer",
    "LocalSGD",
    "PeriodicModelAverager",
    "ZeroRedundancyOptimizer",
    "merge_state_dicts",
]
