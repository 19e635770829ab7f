"""One process, one replica of a module per thread: a batch is cut, computed side by side, and put together again."""

from phalanx.nn.data_parallel.module import DataParallel

__all__ = ["DataParallel"]
