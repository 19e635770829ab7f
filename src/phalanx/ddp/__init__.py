"""Data parallel training: every rank holds the model, and backward leaves every gradient's mean on all of them."""

from phalanx.ddp.module import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
