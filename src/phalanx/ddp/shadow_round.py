"""A `ShadowRound` is this rank's part, zeros, in a round of gradients for which the other ranks have batches."""

from __future__ import annotations

from torch import Tensor

from phalanx.ddp.bucket import DenseBucket, SparseBucket
from phalanx.ddp.bucket_set import BucketSet
from phalanx.ddp.exchange import PendingBucket, SparsePending


class ShadowRound:
    """A `ShadowRound` goes through the buckets of `buckets`, which hold after it what they hold before.

    Cost: a copy of the memory of all buckets.
    """

    def __init__(self, buckets: BucketSet) -> None:
        self._set = buckets
        self._kept: dict[int, Tensor] = {
            bucket.plan.index: bucket.buffer.clone() for bucket in buckets.buckets if isinstance(bucket, DenseBucket)
        }

    def launch(self, pending: list[PendingBucket]) -> None:
        """Launch all buckets with zeros, in the order of the plan; what must be waited for is added to `pending`."""
        for bucket in self._set.buckets:
            if isinstance(bucket, SparseBucket):
                pending.append(SparsePending(bucket, None, self._set.group))
            elif isinstance(bucket, DenseBucket):
                bucket.in_place = None
                bucket.buffer.zero_()
                pending.append(self._set.exchange.launch(bucket))

    def restore(self) -> None:
        """Put back what the buckets held, when all that was launched has been waited for."""
        for bucket in self._set.buckets:
            if isinstance(bucket, SparseBucket):
                bucket.mean = None
            elif isinstance(bucket, DenseBucket):
                bucket.buffer.copy_(self._kept[bucket.plan.index])
