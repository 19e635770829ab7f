"""This package has layers whose forward or backward spans ranks, and modules that span threads or devices."""

from phalanx.nn.data_parallel import DataParallel
from phalanx.nn.placement import Placed, Placement, place
from phalanx.nn.sync_batchnorm import SyncBatchNorm

__all__ = ["DataParallel", "Placed", "Placement", "SyncBatchNorm", "place"]
