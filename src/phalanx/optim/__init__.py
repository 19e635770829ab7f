"""The sharded optimizer: every rank updates its slice of parameters that exist once per host."""

from phalanx.optim.state import merge_state_dicts
from phalanx.optim.zero import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer", "merge_state_dicts"]
