"""`DistributedSampler` is PyTorch's, with an indexable shuffle and a position that can be saved."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data import distributed as torch_sampler

from phalanx._comm.backend.torch_integration.data_loaders import observe_loaders
from phalanx.data.ordered import IndexOrder, OrderedDataset, epoch_key
from phalanx.data.partition import Partition, plan_partition
from phalanx.data.permutation import Indices, Permutation
from phalanx.errors import CheckpointError


class DistributedSampler(torch_sampler.DistributedSampler[int]):
    """Assign every sample of a dataset to exactly one rank, once per epoch.

    It is a drop-in replacement for `torch.utils.data.DistributedSampler`, and its subclass: the same arguments, the
    same lengths, and with `shuffle=False` the same indices. The differences:

    - The shuffle is a keyed permutation that is computed on demand: an epoch over any number of samples starts at once,
      in the memory of one block of indices. The order differs from PyTorch's.
    - `padding=False` assigns each sample exactly once, for evaluation: nothing is repeated, and the first ranks may
      have one sample more.
    - Without `set_epoch`, the epoch advances by itself: the k-th iteration is epoch k. So all ranks must iterate the
      same number of times; if a single rank reads a batch, call `set_epoch`. `set_epoch(e)` makes the next iteration
      epoch e and the one after it e + 1. An iteration begins with its first index, not with `iter()`.
    - `state_dict()` is the position of the whole job in samples, from which any number of ranks can continue.
    - Without a process group, in a process that no launcher started, the job has one rank, so a script also runs alone.
    - Over a `phalanx.data.Stream`, the order is the stream's own, in which its shards are read in sequence.

    Arguments:
        dataset: an object with a length, which the constructor reads once.
        num_replicas: the number of ranks that share the data. Default: the size of the default process group.
        rank: this process's rank. Default: its rank in the default process group.
        shuffle: False keeps the dataset's order.
        seed: the same on every rank. Another seed gives another order in every epoch.
        drop_last: leave out the samples that remain after an equal division among the ranks.
        padding: repeat the first samples until all ranks have the same number; no effect with `drop_last`.

    Raises:
        TypeError: `dataset` has no length.
        ValueError: `rank` is not in `range(num_replicas)`; or there is no group, and only one of the two is given, or a
            launcher started this process.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        padding: bool = True,
    ) -> None:
        self.length = _length_of(dataset)
        num_replicas, rank = _place(num_replicas, rank)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.padding = padding
        self.num_samples = self._count(consumed=0)
        self.total_size = self.num_samples * num_replicas if padding or drop_last else self.length
        self._consumed = 0  # samples of epoch `self.epoch` that are consumed before the next pass
        # the latest pass; None if the next pass will be epoch `self.epoch`
        self._pass: IndexStream | None = None
        self._before_loader: object = None  # the latest pass when a DataLoader last began to iterate
        self._loader_pass: LoaderPass | None = None  # the latest pass of a DataLoader's workers
        observe_loaders(self, DistributedSampler._note_loader, DistributedSampler._note_iterator)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._begin())

    def __len__(self) -> int:
        """Return how many indices this rank gets in the current pass or, between passes, in the next one; fewer if the
        epoch is resumed in the middle.
        """
        if self._pass is None:
            return self._count(self._consumed)
        return self.num_samples if self._pass.is_over else self._pass.length

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`: from its start, unless `load_state_dict` set a position in it."""
        if self._pass is not None or epoch != self.epoch:
            self._consumed = 0
        self.epoch = epoch
        self._pass = None

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the position of the job: the epoch, and the number of its samples that all ranks have consumed.

        The position is the same on every rank at the same step. (With `padding=False`, a rank at the end of its
        partition reports the end of the epoch, even if rank 0 has one more batch: use rank 0's position.)

        A DataLoader's workers read indices ahead of the training loop. `consumed` is the number of samples that this
        rank has really used since the pass's first batch; by default, all indices that the sampler has yielded count.
        (A `CheckpointManager` calls `loop_state_dict` instead, which counts the samples that the loop received.)

            for step, batch in enumerate(loader, start=1):
                train(batch)
                state = sampler.state_dict(consumed=step * loader.batch_size)

        A number larger than the rank's partition, as after a short last batch, counts as the whole partition.

        Raises:
            ValueError: `consumed` is negative.
        """
        if consumed is not None and consumed < 0:
            raise ValueError(f"consumed must be zero or more samples of this rank, got {consumed}")
        epoch, done = self.epoch, self._consumed
        if self._pass is not None:
            done = self._pass.partition.consumed_after(self._pass.num_yielded if consumed is None else consumed)
            if done == self.length:
                epoch, done = epoch + 1, 0
        return {"epoch": epoch, "consumed": done, **self._own_order}

    def loop_state_dict(self) -> dict[str, Any]:
        """Return `state_dict` for the samples that the loop has received, without indices that workers have read ahead.

        Checkpoints save a sampler with this method.

        Raises:
            CheckpointError: the DataLoader has workers, and its number of samples per batch is unknown.
        """
        ahead = self._loader_pass
        if ahead is None or ahead.stream is not self._pass:
            return self.state_dict()
        return self.state_dict(consumed=ahead.samples)

    def _note_loader(self, _: object) -> None:
        self._before_loader = self._pass

    def _note_iterator(self, loader: Any, iterator: Any, _is_new: bool) -> None:
        if self._pass is not self._before_loader:  # only workers begin a pass before the loop requests a batch
            self._loader_pass = pass_of(loader, self, iterator, self._pass)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position of `state_dict` on any number of ranks; the next iteration reads the rest.

        No sample is repeated or left out; padding and `drop_last` apply to the rest.

        Raises:
            CheckpointError: `state` is not such a position, or is one in other data or another order.
        """
        _check_fits(state, self._own_order)
        self.epoch = state["epoch"]
        self._consumed = state["consumed"]
        self._pass = None

    def regroup(self, num_replicas: int, rank: int) -> None:
        """Divide the data among `num_replicas` ranks from the next iteration on; `load_state_dict` may follow.

        Raises:
            ValueError: `rank` is not in `range(num_replicas)`.
        """
        if not 0 <= rank < num_replicas:
            raise ValueError(f"regroup: rank {rank} of {num_replicas}: ranks are 0 to {num_replicas - 1}")
        self.num_replicas, self.rank = num_replicas, rank
        self.num_samples = self._count(consumed=0)
        self.total_size = self.num_samples * num_replicas if self.padding or self.drop_last else self.length

    def _begin(self) -> Iterator[Iterator[int]]:
        # A generator, so that this runs when the first index is requested: a DataLoader with workers calls iter()
        # twice per epoch.
        self._pass = stream = IndexStream(self._plan_partition(self._consumed_before_pass()), self._order())
        yield from stream.blocks()

    def _consumed_before_pass(self) -> int:
        if self._pass is not None:
            self.epoch, self._consumed = self.epoch + 1, 0
        return self._consumed

    def _order(self) -> IndexOrder | None:
        if isinstance(self.dataset, OrderedDataset):
            return self.dataset.order(self.seed, self.epoch, shuffle=self.shuffle)
        return Permutation(self.length, epoch_key(self.seed, self.epoch)) if self.shuffle else None

    @property
    def _own_order(self) -> dict[str, Any]:
        """Return the values that a saved position must contain to be valid for this order."""
        own = {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}
        return own | self.dataset.describe_order() if isinstance(self.dataset, OrderedDataset) else own

    def _count(self, consumed: int) -> int:
        return self._plan_partition(consumed).count

    def _plan_partition(self, consumed: int) -> Partition:
        return plan_partition(
            self.length,
            self.num_replicas,
            self.rank,
            consumed=consumed,
            padding=self.padding,
            drop_last=self.drop_last,
        )


def _length_of(dataset: Dataset[Any]) -> int:
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        kind = "is an IterableDataset" if isinstance(dataset, IterableDataset) else "has no __len__"
        raise TypeError(
            f"DistributedSampler: {type(dataset).__name__} {kind}, so it has no indices to partition. "
            "Give each rank its own part inside the dataset, and no sampler."
        )
    return len(dataset)


def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return both arguments; missing ones come from the default process group, or mean a job of one rank."""
    if dist.is_available() and dist.is_initialized():
        return (
            dist.get_world_size() if num_replicas is None else num_replicas,
            dist.get_rank() if rank is None else rank,
        )
    if num_replicas is None and rank is None:
        if dist.is_available() and dist.is_torchelastic_launched():
            raise ValueError(
                "DistributedSampler: this process was started as a rank of a job, but has no process group yet, "
                "so every rank would read all of the data. Start the group first (phalanx.init())."
            )
        return 1, 0
    if num_replicas is None or rank is None:
        missing = "num_replicas" if num_replicas is None else "rank"
        raise ValueError(
            f"DistributedSampler(num_replicas={num_replicas}, rank={rank}): there is no process group to "
            f"determine {missing}. Pass both, or start the group first (phalanx.init())."
        )
    return num_replicas, rank


def _check_fits(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    missing = [name for name in ("epoch", "consumed", *expected) if name not in state]
    if missing:
        raise CheckpointError(f"load_state_dict: the sampler's state lacks {', '.join(missing)}.")
    wrong = [f"{name} {state[name]} (here {value})" for name, value in expected.items() if state[name] != value]
    if not 0 <= state["consumed"] <= state["length"]:
        wrong.append(f"consumed {state['consumed']} of {state['length']}")
    if wrong:
        raise CheckpointError(
            f"load_state_dict: the saved position belongs to another order: {', '.join(wrong)}. "
            "Build the sampler over the same data with the same arguments, or start the epoch again with set_epoch."
        )


# The indices that one rank reads in one epoch.

BLOCK = 8192  # indices computed at once: 64 KiB per array, which fits in a core's cache


class IndexStream:
    """`IndexStream` is one pass of a rank over its partition of an epoch, in `order` (None: the dataset's order).

    Cost: memory of one block, whatever the partition's size. Iteration within a block runs in C: no index is counted
    individually, because the block's list iterator reports how many are left.
    """

    def __init__(self, partition: Partition, order: IndexOrder | None) -> None:
        self.partition = partition
        self._order = order
        self._computed = 0
        self._block: Iterator[int] = iter(())

    @property
    def num_yielded(self) -> int:
        """Return the number of indices yielded so far."""
        return self._computed - operator.length_hint(self._block)

    @property
    def length(self) -> int:
        """Return the number of indices of the pass."""
        return self.partition.count

    @property
    def is_over(self) -> bool:
        """Return whether the whole partition has been yielded."""
        return self.num_yielded >= self.partition.count

    def blocks(self) -> Iterator[Iterator[int]]:
        """Yield iterators over the consecutive blocks, which together are the pass."""
        while self._computed < self.partition.count:
            size = min(BLOCK, self.partition.count - self._computed)
            indices = self.compute(self._computed, size).tolist()
            self._computed += size
            self._block = iter(indices)
            yield self._block

    def compute(self, first: int, size: int) -> Indices:
        partition = self.partition
        return _compute_indices(
            partition.start + first * partition.step, partition.step, size, partition.length, self._order
        )


def _compute_indices(first: int, step: int, size: int, length: int, order: IndexOrder | None) -> Indices:
    """Return the indices at `size` positions of an order; positions past its end wrap around to its beginning."""
    positions = np.arange(size, dtype=np.uint64)
    positions *= np.uint64(step)
    positions += np.uint64(first)
    if first + (size - 1) * step >= length:
        positions %= np.uint64(length)
    return positions if order is None else order.take(positions)


class YieldedBatches:
    """`YieldedBatches` counts the batches that the loop received from an iterator, even once the iterator is gone."""

    def __init__(self, iterator: Any) -> None:
        self._attributes: dict[str, Any] = vars(iterator)  # the iterator itself would keep its workers alive
        self._before: int = iterator._num_yielded  # the batches of earlier epochs, or of a loaded state
        self._count = 0
        self._reference = weakref.ref(iterator, self._on_end)

    def _on_end(self, _: object) -> None:
        self._count = self.num_batches
        self._attributes = {}

    @property
    def num_batches(self) -> int:
        """Return how many batches of this pass the loop has received."""
        number: int = self._attributes.get("_num_yielded", self._count + self._before)
        return number - self._before


@dataclass(frozen=True)
class LoaderPass:
    """A `LoaderPass` is a pass over a sampler by a DataLoader whose workers read indices ahead.

    `batch_size` is None if the number of samples per batch is unknown.
    """

    stream: IndexStream
    yielded: YieldedBatches
    batch_size: int | None
    drops_last: bool
    loader: str

    @property
    def samples(self) -> int:
        """Return how many samples the loop has received.

        Raises:
            CheckpointError: the number is unknown.
        """
        if self.batch_size is None:
            raise CheckpointError(
                f"the workers of {self.loader} have read indices ahead of the loop, so the number of samples that the "
                "loop has used is unknown. Save sampler.state_dict(consumed=...) as the part, or save the loader "
                "instead, if it has a state_dict; or give the loader's batch_sampler the attributes `sampler` and "
                "`batch_size`."
            )
        count = self.stream.partition.count
        used = min(self.yielded.num_batches * self.batch_size, count)
        return count if self.drops_last and count - used < self.batch_size else used


def pass_of(loader: Any, sampler: Any, iterator: Any, stream: Any) -> LoaderPass:
    """Return the pass over `sampler` that `loader` has begun with `iterator`; `stream` yields its indices."""
    batches = getattr(loader, "batch_sampler", None)
    is_over = sampler is getattr(loader if batches is None else batches, "sampler", None)
    size = 1 if batches is None else getattr(batches, "batch_size", None)
    # A loader with a `state_dict` resumes in the middle of a pass by itself.
    known = is_over and isinstance(size, int) and not hasattr(loader, "state_dict")
    return LoaderPass(
        stream,
        YieldedBatches(iterator),
        size if known else None,
        bool(getattr(batches, "drop_last", False)),
        type(loader).__name__,
    )
