"""What makes a watch of the batches of torch's DistributedDataParallel: rooms above this one look at batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

batch_watches: list[Callable[[Any, int, int], Any]] = []
"""One, which takes the group's store, the rank and the number of ranks; or none."""
