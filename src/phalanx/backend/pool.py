"""Blocks of the shared heap that torch's allocator gets while a backward runs: the picture is in csrc/pool.h."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import _core
from phalanx.backend.shared import shared_empty

_SPARE = 2  # blocks of a size for each tensor that is expected: autograd may need one more to make the next


class SharedPool:
    """Serves tensors of `expected` sizes (bytes -> how many) to this thread between `enter` and `leave`.

    Where a tensor of such a size is made in between, it may lie in the group's heap; `offset_of` tells. It is an
    ordinary tensor otherwise, may live as long as anybody wants, and gives its block back when it dies. What the pool
    has no block for lies in ordinary memory: also everything, where torch's allocator can't be reached.

    Collective: all ranks build theirs, for the same sizes. Tensors need not lie at the same offset on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, expected: Mapping[int, int]) -> None:
        _sweep()
        classes = tuple((nbytes, _SPARE * count) for nbytes, count in sorted(expected.items()))
        nbytes = sum(math.ceil(size / _core.PAGE) * _core.PAGE * most for size, most in classes)
        self._memory = shared_empty(nbytes + _core.PAGE, dtype=torch.uint8, group=group)  # untouched pages cost nothing
        self._arena = group._memory.arena  # type: ignore[attr-defined]  # groups of backend "phalanx" have one
        begin = -(-self._memory.data_ptr() // _core.PAGE) * _core.PAGE
        self._range = range(begin, begin + nbytes)
        self._pool: _core.Pool | None = None
        with contextlib.suppress(OSError):  # another allocator, another build of torch: gradients are copied, as ever
            self._pool = _core.Pool(begin, nbytes, classes)

    def enter(self) -> None:
        """From here on, this thread's tensors may lie in the pool."""
        if self._pool is not None and not self._arena.closed:
            self._pool.enter()

    def leave(self) -> None:
        """Up to here."""
        if self._pool is not None:
            self._pool.leave()

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory is a block of the pool."""
        return tensor.data_ptr() in self._range

    def close(self) -> None:
        """No more blocks are given out; those in use stay until their tensors die."""
        if self._pool is not None:
            self._pool.leave()
            _closed.append((self._pool, self._memory))
            self._pool = None
        _sweep()


_closed: list[tuple[_core.Pool, Tensor]] = []


def _sweep() -> None:
    """Let go of closed pools that no tensor uses any more."""
    _closed[:] = [(pool, memory) for pool, memory in _closed if not pool.delete()]


os.register_at_fork(after_in_child=_core.pools_after_fork)
