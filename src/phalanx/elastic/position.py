"""Track a job's position in its data: the samples that its loop has used, not those that workers have prefetched."""

from __future__ import annotations

import hashlib
import random
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from phalanx._comm.backend.torch_integration.data_loaders import call_before_fetch, observe_loaders
from phalanx.data import DistributedSampler
from phalanx.data.partition import Partition


@dataclass(frozen=True)
class Mark:
    """A `Mark` is this rank's position in the data at a commit; `consumed` converts it to the job's position."""

    epoch: int
    partition: Partition | None
    used: int
    """How many samples are used: of this rank's partition, or without a partition, of the epoch by all ranks."""

    @property
    def consumed(self) -> int:
        """Return how many samples of the epoch all ranks together have used, if they are at the same step."""
        return self.used if self.partition is None else self.partition.consumed_after(self.used)

    def is_in_pass_of(self, other: Mark) -> bool:
        """Return whether both marks are in the same pass."""
        return self.partition is other.partition is not None

    def is_at(self, other: Mark) -> bool:
        """Return whether both marks are at the same position of the same pass."""
        return self.is_in_pass_of(other) and self.used == other.used

    @property
    def is_inside(self) -> bool:
        """Return whether samples of the epoch have been used."""
        return self.consumed > 0


class DataPosition:
    """`DataPosition` counts the batches, or indices, that the latest DataLoader over `sampler` has yielded to the loop.

    `on_iterator` is called when such a loader has begun a pass, with the loader and whether its iterator is a new one.
    """

    def __init__(self, sampler: DistributedSampler, on_iterator: Callable[[Any, bool], None]) -> None:
        self.sampler = sampler
        self._on_iterator = on_iterator
        self._iterator: Callable[[], Any] = lambda: None
        self._yielded_before = 0
        self._batch_size = 1
        self._drops_last = False
        self._counted: tuple[Any, int] = None, 0  # a pass, and the number of its samples that the loop reported as used
        observe_loaders(self, DataPosition._read_batch_size, DataPosition._observe)

    def _is_over_mine(self, loader: Any) -> bool:
        batch_sampler = getattr(loader, "batch_sampler", None)
        return self.sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None))

    def _read_batch_size(self, loader: Any) -> None:
        if not self._is_over_mine(loader):
            return
        batch_sampler = getattr(loader, "batch_sampler", None)
        size = getattr(batch_sampler, "batch_size", None) if batch_sampler is not None else 1
        if not isinstance(size, int):
            raise ValueError(
                f"phalanx.elastic: {type(batch_sampler).__name__} has no batch_size, so the number of samples in a "
                "batch is unknown. Give the batch sampler a `batch_size` attribute."
            )
        self._batch_size = size
        self._drops_last = bool(getattr(batch_sampler, "drop_last", False))
        is_next = self.sampler._pass is not None  # then the sampler advances to the next epoch by itself
        if hasattr(loader, "worker_init_fn"):
            seed_workers(loader, self.sampler.seed, self.sampler.epoch + is_next)

    def _observe(self, loader: Any, iterator: Any, is_new: bool) -> None:
        if not self._is_over_mine(loader):
            return
        self._iterator = weakref.ref(iterator)
        # above zero if the iterator has loaded a state, as torchdata's iterators do
        self._yielded_before = iterator._num_yielded
        self._on_iterator(loader, is_new)

    def samples_between(self, last: Mark | None, mark: Mark) -> int:
        """Return how many samples this rank has used since `last`, or since its pass began if `last` is in another."""
        if mark.partition is None:
            return 0
        before = last.used if last is not None and last.partition is mark.partition else 0
        return mark.used - before

    def mark(self) -> Mark:
        sampler = self.sampler
        stream = sampler._pass
        if stream is None:
            return Mark(sampler.epoch, None, sampler._consumed)
        counted, used = self._counted
        return Mark(sampler.epoch, stream.partition, used if counted is stream else self._count_yielded(stream))

    def next_pass(self) -> Mark:
        """Return the position of a pass that begins now, unless the loop sets an epoch."""
        sampler = self.sampler
        is_next = sampler._pass is not None  # then the sampler advances to the next epoch by itself
        return Mark(sampler.epoch + 1, None, 0) if is_next else Mark(sampler.epoch, None, sampler._consumed)

    @property
    def is_counted(self) -> bool:
        """Return whether the loop itself counts the samples of the current pass."""
        return self._counted[0] is not None and self._counted[0] is self.sampler._pass

    def count(self, samples: int) -> None:
        """Count `samples` more of this pass as used, and ignore the loader's own count until the pass ends.

        Raises:
            ValueError: `samples` is not an int from 0 on, or the loader has not yielded so many, or has begun another
                pass too early.
        """
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
            raise ValueError(f"State.commit(samples={samples!r}): pass how many samples of this rank the step has used")
        stream = self.sampler._pass
        counted, used = self._counted
        # A loop that breaks out of an epoch begins the next pass, too, but its sampler has not yielded all of this one.
        if counted is not None and counted is not stream and stream is not None and counted.is_over:
            length = counted.length - (counted.length % self._batch_size if self._drops_last else 0)
            if used < length:
                raise ValueError(
                    f"State.commit(samples={samples}): the loop began the next epoch after using only {used} of "
                    f"{length} samples of this rank, so the epoch of these samples is unknown. Stop the prefetcher at "
                    "the end of each epoch."
                )
        used = samples + (used if counted is stream else 0)
        num_yielded = 0 if stream is None else self._count_yielded(stream)
        if used > num_yielded:
            raise ValueError(
                f"State.commit(samples={samples}): this makes {used} samples of this rank in this epoch, but the "
                f"loader has yielded only {num_yielded}. Pass the samples of this rank, not of all ranks."
            )
        self._counted = stream, used

    def end_epoch(self) -> None:
        """Forget the samples that the loop has reported for the current pass."""
        self._counted = None, 0

    def _count_yielded(self, stream: Any) -> int:
        iterator = self._iterator()
        if iterator is None:
            ahead = self.sampler._loader_pass  # the iterator is gone, and its workers may have read more than was used
            known = ahead is not None and ahead.stream is stream and ahead.batch_size is not None
            return ahead.samples if ahead is not None and known else int(stream.num_yielded)
        batches = iterator._num_yielded - self._yielded_before
        samples: int = batches * self._batch_size
        count: int = stream.partition.count
        return min(samples, count)  # the last batch may be smaller

    def seek(self, epoch: int, consumed: int) -> None:
        """Move to `consumed` samples of `epoch`: the next pass begins there, with the rest of that epoch."""
        self._iterator = lambda: None
        self.end_epoch()
        own = self.sampler.state_dict()
        self.sampler.load_state_dict({**own, "epoch": epoch, "consumed": consumed})


def seed_workers(loader: Any, seed: int, epoch: int) -> None:
    """Make `loader`'s workers seed their generators for each batch from the seed, the epoch and the first index.

    So the draws do not depend on a worker's earlier batches, nor on which rank or worker makes the batch. PyTorch seeds
    a worker only at its start, so a worker started in the middle of an epoch would repeat the epoch's first draws.
    """
    if loader.num_workers == 0:
        return
    if not isinstance(loader.worker_init_fn, _SeedBatches):
        loader.worker_init_fn = _SeedBatches(seed, loader.worker_init_fn)
    loader.worker_init_fn.epoch = epoch


class _SeedBatches:
    """`_SeedBatches` is a `worker_init_fn` that seeds a worker before each batch, and calls the user's own function."""

    def __init__(self, seed: int, then: Callable[[int], None] | None) -> None:
        self._seed, self._then = seed, then
        # In shared memory, so that persistent workers see a new epoch, whether they were forked or spawned.
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch.fill_(number)

    def __call__(self, worker: int) -> None:
        if self._then is not None:
            self._then(worker)
        call_before_fetch(self._seed_batch)

    def _seed_batch(self, indices: Any) -> None:
        first = indices[0] if isinstance(indices, (list, tuple)) and indices else indices
        text = f"{self._seed} {self.epoch} {first}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(number)
        random.seed(number)
        if "numpy" in sys.modules:
            import numpy as np

            np.random.seed(number % (1 << 32))
