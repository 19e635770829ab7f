"""Register the slice of a gradient's mean that this rank's optimizer needs; the averaging code looks it up.

With an optimizer that is sharded over the ranks of a host, each rank updates a slice of each parameter, in shared
memory. So a rank needs the mean only in that slice.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# A gradient of this size or more has its own bucket, stays where autograd wrote it, and is divided between ranks. For a
# smaller gradient, a copy within the cache costs less than the bookkeeping.
LARGE_BYTES = 256 * 1024


class NeededSlice:
    """A `NeededSlice` is the elements `start` to `stop`, in memory order, of a gradient averaged over `ranks`."""

    def __init__(self, start: int, stop: int, ranks: Iterable[int]) -> None:
        self.start = start
        self.stop = stop
        self.ranks = tuple(ranks)
        self._mean: weakref.ref[Tensor] | None = None
        self._version = 0

    def mark(self, gradient: Tensor) -> None:
        """Record that `gradient` holds the mean in the slice, and this rank's own values elsewhere."""
        self._mean, self._version = weakref.ref(gradient), gradient._version

    def is_mean(self, gradient: Tensor) -> bool:
        """Return whether `gradient` is the recorded tensor itself."""
        return self._mean is not None and self._mean() is gradient

    def is_touched(self, gradient: Tensor) -> bool:
        """Return whether the recorded gradient exists, and the program has changed it or replaced it by `gradient`."""
        marked = None if self._mean is None else self._mean()
        return marked is not None and (marked is not gradient or gradient._version != self._version)


_needed: MutableMapping[Tensor, NeededSlice] = WeakIdKeyDictionary()


def need_slice(parameter: Tensor, start: int, stop: int, group: dist.ProcessGroup) -> None:
    """Register that this rank needs only elements `start` to `stop` of the parameter's mean gradient.

    The registration applies from the next backward pass on. Collective: every rank of `group` registers a slice of the
    same parameters before that pass, and the slices cover all elements.
    """
    _needed[parameter] = NeededSlice(start, stop, dist.get_process_group_ranks(group))


def need_all(parameter: Tensor) -> None:
    """Register that this rank needs the whole mean again, from the next backward pass on. All ranks call this."""
    _needed.pop(parameter, None)


def is_partial(parameter: Tensor) -> bool:
    """Return whether the parameter's gradient is the mean only in the slice that this rank needs."""
    needed = _needed.get(parameter)
    return needed is not None and parameter.grad is not None and needed.is_mean(parameter.grad)


def find_needed(parameter: Tensor, group: dist.ProcessGroup) -> NeededSlice | None:
    """Return the slice that this rank needs of a gradient averaged over `group`; None if it needs all of it."""
    needed = _needed.get(parameter)
    if needed is None or needed.ranks != tuple(dist.get_process_group_ranks(group)):
        return None
    return needed
