"""Reduce tensors in the shared heap in place, each as soon as it is ready on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx import _core
from phalanx._base.dtypes import dtype_of
from phalanx._comm.backend.arguments import reduction_of
from phalanx._comm.backend.shared import shared_empty
from phalanx._comm.diagnostics.call_sites import calling_site
from phalanx._comm.diagnostics.failure_report import closed
from phalanx._comm.diagnostics.operation_sampler import note_gradients
from phalanx._comm.transport.base import CallContext
from phalanx.errors import ClosedError


class SharedReducer:
    """A `SharedReducer` reduces the same tensors in place in every round. All ranks create theirs together.

    In each round call `begin`, then `ready(i)` once for each tensor in any order, then `finish`. The reducer owns
    tensor i from `ready(i)` to the end of `finish`. In any round, and on any rank, another tensor of the group's heap
    with the same size and dtype may replace tensor i.
    """

    def __init__(self, group: Any, tensors: Sequence[Tensor], op: Any) -> None:
        self._group = group
        self._memory = group.shared_memory
        self._tensors = list(tensors)  # keeps the heap's blocks alive
        words = _core.reducer_bytes(len(tensors)) // 4
        self._flags = shared_empty(words, dtype=torch.int32, group=group).zero_()
        note_gradients(self._memory.group, sum(tensor.nbytes for tensor in tensors))
        ctx = self._call_context()
        group.in_order(lambda: self._memory.barrier(ctx))  # no rank sets a flag before all flags are clear
        self._reducer = _core.Reducer(
            self._memory.core,
            self._offset(self._flags),
            tuple((t.numel(), dtype_of(t.dtype).code, reduction_of(op, t.dtype, "gradients")[0]) for t in tensors),
        )

    def _offset(self, tensor: Tensor) -> int:
        """Return the tensor's offset in the heap, which is the same on every rank."""
        return int(self._memory.symm_mem.heap_offset(tensor.data_ptr()))

    def _call_context(self) -> CallContext:
        return CallContext(self._group.timeout_s, self._memory.call_site(calling_site()))

    def begin(self) -> None:
        """Start a round, after the previous round has finished."""
        if self._memory.symm_mem.closed:
            raise closed(self._memory.group)
        self._group.refuse_nested("a round of gradients")
        self._reducer.begin()

    def ready(self, number: int, instead: Tensor | None = None, needed: tuple[int, int] | None = None) -> None:
        """Mark this rank's tensor, or its replacement `instead`, as ready for the reduction.

        With `needed`, this rank receives only these elements (start, stop) of the result, and its other elements stay
        unchanged. Either all ranks pass `needed` or none does; together their ranges cover each element once.

        The call also reduces, without waiting, every tensor that is ready on all ranks.
        """
        if self._memory.symm_mem.closed:
            raise closed(self._memory.group)
        offset = self._offset(self._tensors[number] if instead is None else instead)
        try:
            self._reducer.ready(number, offset, *(needed or ()))
        except ClosedError:
            raise closed(self._memory.group) from None

    def finish(self) -> None:
        """Wait until every tensor is reduced on every rank."""
        if self._memory.symm_mem.closed:
            raise closed(self._memory.group)
        ctx = self._call_context()
        with self._group.executor.bypass():
            status = self._reducer.finish(ctx.timeout_ns, ctx.call_site)
        self._memory.check(status, ctx)
        self._group.num_gradient_rounds += 1
