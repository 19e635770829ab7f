"""A `Round` tracks how far one round is, from the first gradient of a backward to the mean in all buckets."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.ddp.exchange import PendingBucket
from phalanx.ddp.plan import Bucket


class Round:
    """A round tracks gradients that come in any order, and buckets that are launched in the order of the plan."""

    def __init__(self, buckets: Sequence[Bucket], num_parameters: int) -> None:
        self.started = False
        self.fires = [0] * num_parameters  # how often each gradient was written
        self.ready = [False] * num_parameters  # nothing is added to it any more
        self.order: dict[int, None] = {}  # parameters, as their gradients came
        self.num_missing = [len(bucket.slots) for bucket in buckets]
        self.complete: list[int] = []  # buckets whose gradients are all there, and which are to be filled
        self.num_launched = 0
        self.pending: list[PendingBucket] = []

    def mark_ready(self, index: int, *, bucket: int) -> None:
        """Note that a parameter, which has a place in `bucket`, gets no more gradients."""
        self.ready[index] = True
        self.num_missing[bucket] -= 1
        if self.num_missing[bucket] == 0:
            self.complete.append(bucket)
