"""Where in the data a job stands: what its training loop has used, not what DataLoader workers have read ahead."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.backend.torch_patches import observe_loaders
from phalanx.data import DistributedSampler
from phalanx.data.partition import Partition


@dataclass(frozen=True)
class Mark:
    """This rank's position at a commit; cheap to make, turned into the job's position when it is needed."""

    epoch: int
    partition: Partition | None
    used: int
    """Samples of this rank's partition; without a partition, of the whole job's epoch."""

    @property
    def consumed(self) -> int:
        """Of the epoch, by all ranks together, if they stand at the same step."""
        return self.used if self.partition is None else self.partition.consumed_after(self.used)

    @property
    def is_inside(self) -> bool:
        """Whether the epoch has begun."""
        return self.consumed > 0


class DataPosition:
    """Counts the batches that the loop has got from the latest DataLoader over `sampler`, or its indices without one.

    `on_iterator` is called when such a loader has begun a pass, with whether its iterator is a new one that an
    undisturbed loader would have had from an earlier pass: its workers last (`persistent_workers`).
    """

    def __init__(self, sampler: DistributedSampler, on_iterator: Callable[[bool], None]) -> None:
        self.sampler = sampler
        self._on_iterator = on_iterator
        self._iterator: Callable[[], Any] = lambda: None
        self._batch_size = 1
        observe_loaders(self, DataPosition._observe)

    def _observe(self, loader: Any, iterator: Any, is_new: bool) -> None:
        batch_sampler = getattr(loader, "batch_sampler", None)
        if self.sampler not in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
            return
        self._iterator = weakref.ref(iterator)
        size = getattr(batch_sampler, "batch_size", None) if batch_sampler is not None else 1
        if not isinstance(size, int):
            raise ValueError(
                f"phalanx.elastic: {type(batch_sampler).__name__} does not say its batch_size, so nobody can tell how "
                "many samples a batch has used up. Give it the attribute `batch_size`."
            )
        self._batch_size = size
        self._on_iterator(is_new and bool(getattr(loader, "persistent_workers", False)))

    @property
    def batch_size(self) -> int:
        """Of the latest loader."""
        return self._batch_size

    def mark(self) -> Mark:
        """Where this rank is."""
        sampler = self.sampler
        stream = sampler._pass
        if stream is None:
            return Mark(sampler.epoch, None, sampler._consumed)
        iterator = self._iterator()
        used = stream.taken if iterator is None else iterator._num_yielded * self._batch_size
        return Mark(sampler.epoch, stream.partition, used)

    def go_to(self, epoch: int, consumed: int) -> None:
        """The next pass is the rest of that epoch."""
        self._iterator = lambda: None
        own = self.sampler.state_dict()
        self.sampler.load_state_dict({**own, "epoch": epoch, "consumed": consumed})
