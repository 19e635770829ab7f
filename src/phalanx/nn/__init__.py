"""Layers whose forward or backward spans ranks."""

from phalanx.nn.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
