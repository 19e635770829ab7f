"""Optimizers over many ranks: each its slice of parameters that exist once per host, or replicas that train apart."""

from phalanx.optim.averager import PeriodicModelAverager
from phalanx.optim.diloco import DiLoCo
from phalanx.optim.local_sgd import LocalSGD
from phalanx.optim.state import merge_state_dicts
from phalanx.optim.zero import ZeroRedundancyOptimizer

__all__ = ["DiLoCo", "LocalSGD", "PeriodicModelAverager", "ZeroRedundancyOptimizer", "merge_state_dicts"]
