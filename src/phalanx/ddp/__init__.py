"""Data parallel training: every rank has a copy of the model, and backward averages the gradients over all ranks."""

from phalanx.ddp.module import DistributedDataParallel
from phalanx.ddp.replicas import check_replicas

__all__ = ["DistributedDataParallel", "check_replicas"]
