"""`DataParallel` cuts a batch, computes the parts in one process, a thread for each replica, and joins the outputs."""

from phalanx.nn.data_parallel.module import DataParallel

__all__ = ["DataParallel"]
