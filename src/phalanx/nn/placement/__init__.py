"""Place a model on several devices in one process: each layer is on a device, and values are brought to it.

devices    which devices, and how much each may hold
together   which layers must be on one device: those that share a tensor
plan       where to cut: a table, decided from measured costs
move       parameters and buffers to their devices, ties kept
transfers  the model's graph with a transfer wherever a value is needed on another device
module     `place` itself, and what a placed module can do
"""

from phalanx.nn.placement.module import Placed, place
from phalanx.nn.placement.plan import Placement

__all__ = ["Placed", "Placement", "place"]
