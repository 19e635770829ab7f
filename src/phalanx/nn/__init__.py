"""Layers whose forward or backward spans ranks, and modules that span threads."""

from phalanx.nn.data_parallel import DataParallel
from phalanx.nn.sync_batchnorm import SyncBatchNorm

__all__ = ["DataParallel", "SyncBatchNorm"]
