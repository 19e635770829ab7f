"""This package has layers whose forward or backward spans ranks, and modules that span devices."""

from phalanx.nn.placement import Placed, Placement, place
from phalanx.nn.sync_batchnorm import SyncBatchNorm

__all__ = ["Placed", "Placement", "SyncBatchNorm", "place"]
