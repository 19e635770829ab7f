"""Give torch's allocator blocks of the shared heap during a backward pass; csrc/pool.h has a diagram."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from phalanx import _core
from phalanx._base.log import get_logger, warn_once
from phalanx._comm.symmetric_memory.memory import SymmetricMemory

_SPARE = 2  # blocks for each expected tensor: autograd may need one more to compute the next gradient

_logger = get_logger(__name__)


class SharedPool:
    """A `SharedPool` serves tensors of `expected` sizes (bytes -> count) to this thread between `enter` and `leave`.

    A tensor of such a size that is created meanwhile may be in the group's heap; `contains` returns whether it is. Such
    a tensor is otherwise ordinary: it may live for any time, and its block is free again when it dies. If no block is
    free, a tensor is in ordinary memory; all tensors are if torch's allocator cannot be replaced.

    All ranks create theirs together, for the same sizes. Tensors may have different offsets on different ranks.
    `allocate` returns symmetric memory of a given size; untouched pages cost nothing.
    """

    def __init__(
        self, symm_mem: SymmetricMemory, expected: Mapping[int, int], allocate: Callable[[int], Tensor]
    ) -> None:
        _sweep()
        classes = tuple((nbytes, _SPARE * count) for nbytes, count in sorted(expected.items()))
        nbytes = sum(math.ceil(size / _core.PAGE) * _core.PAGE * most for size, most in classes)
        self._sizes = frozenset(expected)
        self._memory = allocate(nbytes + _core.PAGE)
        self._symm_mem = symm_mem
        begin = -(-self._memory.data_ptr() // _core.PAGE) * _core.PAGE
        self._range = range(begin, begin + nbytes)
        self._pool: _core.Pool | None = None
        self._is_active = True
        try:
            self._pool = _core.Pool(begin, nbytes, classes)
        except OSError as error:  # another build of torch, or too many pools
            self._deactivate(error)

    def _deactivate(self, why: OSError) -> None:
        self._is_active = False
        warn_once(
            _logger,
            f"torch's allocator cannot use the memory that ranks share ({why.strerror or why}), so large gradients "
            "are copied there. Results are the same; steps are slightly slower.",
        )

    def enter(self) -> bool:
        """Allocate this thread's tensors in the pool from now on; return whether it already served this thread."""
        if self._pool is not None and self._is_active and not self._symm_mem.closed:
            try:
                return self._pool.enter()
            except OSError as error:
                self._deactivate(error)
        return False

    def leave(self) -> None:
        """Stop allocating this thread's tensors in the pool."""
        if self._pool is not None:
            self._pool.leave()

    def serves(self, nbytes: int) -> bool:
        """Return whether tensors of this size are expected; the result is the same on every rank."""
        return nbytes in self._sizes

    def contains(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() in self._range

    def empty_strided(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return a new tensor in the pool, like `torch.empty_strided`; None if no block is free."""
        was_inside = self.enter()
        try:
            made = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        finally:
            if not was_inside:
                self.leave()
        return made if self.contains(made) else None

    def close(self) -> None:
        """Stop serving blocks; blocks in use stay until their tensors die."""
        if self._pool is not None:
            self._pool.leave()
            _closed[self._pool] = self._memory
            self._pool = None
        _sweep()


_closed: dict[_core.Pool, Tensor] = {}


def _sweep() -> None:
    """Free closed pools that no tensor uses any longer.

    Any code that runs here may run a finalizer that closes another pool and calls `_sweep` again. So this iterates over
    a copy, and removes only pools of the copy.
    """
    for pool in list(_closed):
        if pool.delete():
            _closed.pop(pool, None)


os.register_at_fork(after_in_child=_core.pools_after_fork)
