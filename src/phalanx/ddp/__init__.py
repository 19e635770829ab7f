"""In data parallel training every rank holds the model, and backward leaves every gradient's mean on all of them."""

from phalanx.ddp.module import DistributedDataParallel
from phalanx.ddp.replicas import check_replicas

__all__ = ["DistributedDataParallel", "check_replicas"]
