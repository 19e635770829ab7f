"""A room above this one leaves here the class that watches the batches of torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

batch_watches: list[Callable[[Any, int, int], Any]] = []
"""The function, if there is one, that is called with the group's store, the rank and the number of ranks."""
