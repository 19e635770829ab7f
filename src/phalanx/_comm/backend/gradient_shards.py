"""An optimizer says here which slice of a gradient's mean its rank needs, and the averaging code asks for it.

An optimizer that is sharded over the ranks of a host updates a slice of each parameter, in memory that all of them see.
Then a rank needs the mean in that slice only, and it need not be written anywhere else.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping

import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# From this size on a gradient has a bucket to itself, lies where autograd wrote it, and is cut between ranks: for a
# smaller one a copy, in the cache, costs less than its own bookkeeping.
LARGE_BYTES = 256 * 1024


class NeededSlice:
    """A rank needs elements `start` to `stop`, in the order of memory, of a gradient that is averaged over `ranks`."""

    def __init__(self, start: int, stop: int, ranks: Iterable[int]) -> None:
        self.start = start
        self.stop = stop
        self.ranks = tuple(ranks)
        self._mean: weakref.ref[Tensor] | None = None
        self._version = 0

    def mark(self, gradient: Tensor) -> None:
        """Note that `gradient` holds the mean in the slice, and this rank's own values elsewhere."""
        self._mean, self._version = weakref.ref(gradient), gradient._version

    def is_mean(self, gradient: Tensor) -> bool:
        """Return whether this very tensor was marked."""
        return self._mean is not None and self._mean() is gradient

    def is_touched(self, gradient: Tensor) -> bool:
        """Return whether a program changed or replaced the gradient that was marked, while that one lives."""
        marked = None if self._mean is None else self._mean()
        return marked is not None and (marked is not gradient or gradient._version != self._version)


_needed: MutableMapping[Tensor, NeededSlice] = WeakIdKeyDictionary()


def need_slice(parameter: Tensor, start: int, stop: int, group: dist.ProcessGroup) -> None:
    """From the next backward on, average only elements `start` to `stop` of the parameter's gradient for this rank.

    Collective in this sense: every rank of `group` says so for the same parameters before the next backward, and every
    element is needed by one of them.
    """
    _needed[parameter] = NeededSlice(start, stop, dist.get_process_group_ranks(group))


def need_all(parameter: Tensor) -> None:
    """From the next backward on, give this rank the whole mean. All ranks call it, as `need_slice`."""
    _needed.pop(parameter, None)


def find_needed(parameter: Tensor, group: dist.ProcessGroup) -> NeededSlice | None:
    """Return what this rank needs of a gradient that is averaged over `group`; None for all of it."""
    needed = _needed.get(parameter)
    if needed is None or needed.ranks != tuple(dist.get_process_group_ranks(group)):
        return None
    return needed
