"""Reduce tensors of the shared heap in place, each as soon as all ranks have it."""

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
    """A `SharedReducer` reduces the same tensors in place in every round. All ranks build it together.

    In a round `begin` is called, then `ready(i)` once for each tensor, in any order and with anything in between, then
    `finish`. From `ready(i)` to the end of `finish` tensor i belongs to the reducer. Another tensor of the group's
    heap, of the same size and dtype, may stand in for tensor i in a round, on any rank, wherever it lies there.
    """

    def __init__(self, group: Any, tensors: Sequence[Tensor], op: Any) -> None:
        self._group = group
        self._memory = group.shared_memory
        self._tensors = list(tensors)  # the heap's blocks stay ours as long as the reducer does
        words = _core.reducer_bytes(len(tensors)) // 4
        self._flags = shared_empty(words, dtype=torch.int32, group=group).zero_()
        note_gradients(self._memory.group, sum(tensor.nbytes for tensor in tensors))
        ctx = self._call_context()
        group.in_order(lambda: self._memory.barrier(ctx))  # nobody raises a flag before all flags are down
        self._reducer = _core.Reducer(
            self._memory.core,
            self._offset(self._flags),
            tuple((t.numel(), dtype_of(t.dtype).code, reduction_of(op, t.dtype, "gradients")[0]) for t in tensors),
        )

    def _offset(self, tensor: Tensor) -> int:
        """Return where in the heap the tensor lies; it is the same on every rank."""
        return int(self._memory.symm_mem.heap_offset(tensor.data_ptr()))

    def _call_context(self) -> CallContext:
        return CallContext(self._group.timeout_s, self._memory.call_site(calling_site()))

    def begin(self) -> None:
        """Open a round; the last one has finished."""
        if self._memory.symm_mem.closed:
            raise closed(self._memory.group)
        self._group.refuse_nested("a round of gradients")
        self._reducer.begin()

    def ready(self, number: int, instead: Tensor | None = None, needed: tuple[int, int] | None = None) -> None:
        """Hand in this rank's tensor, or the one `instead` of it, which is complete.

        If `needed` is given, this rank needs only these elements (start, stop) of the result, and what lies elsewhere
        stays as it is. All ranks give it, or none does; together they need each element once.

        It also reduces, without waiting, every tensor that all ranks have.
        """
        if self._memory.symm_mem.closed:
            raise closed(self._memory.group)
        offset = self._offset(self._tensors[number] if instead is None else instead)
        try:
            self._reducer.ready(number, offset, *(needed or ()))
        except ClosedError:
            raise closed(self._memory.group) from None

    def finish(self) -> None:
        """Return when every tensor holds the reduction on every rank."""
        if self._memory.symm_mem.closed:
            raise closed(self._memory.group)
        ctx = self._call_context()
        with self._group.executor.bypass():
            status = self._reducer.finish(ctx.timeout_ns, ctx.call_site)
        self._memory.check(status, ctx)
        self._group.num_gradient_rounds += 1
