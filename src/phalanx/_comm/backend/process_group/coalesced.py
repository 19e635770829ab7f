"""Carry out several collectives in one call, for c10d's `_coalesced` operations and its coalescing manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._comm.backend.arguments import (
    ArgumentError,
    check_apart,
    check_list,
    check_one_type,
    check_parts,
    check_tensor,
    reduction_of,
)
from phalanx._comm.backend.dynamo import untraced
from phalanx._comm.backend.process_group.collectives import ProcessGroupCollectives
from phalanx._comm.backend.process_group.entry import entry_point
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.several import copy_to_others, unshared, unshared_steps

Work = dist.Work


@untraced
class ProcessGroupCoalesced(ProcessGroupCollectives):
    """It carries operations of several tensors out one after another, on the values from before the call.

    Shape: any, contiguous or not; each tensor as the operation on one tensor asks.
    Cost and numerics: those of the operations on one tensor, one after another.

    Raises:
        ValueError, TypeError: an argument that is wrong whatever the other ranks do; nothing was sent.
        MismatchError, PeerLostError, DeadlineError, ClosedError: as the operations on one tensor.
    """

    @entry_point
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Reduce each tensor from its values before the call, even if tensors share memory."""
        if not tensors:
            raise ArgumentError("all_reduce_coalesced: requires non-empty tensor list")
        checked = check_one_type(tensors, "all_reduce_coalesced", written=True)
        code, factor = reduction_of(opts.reduceOp, checked[0].dtype, "all_reduce_coalesced")

        def run(ctx: CallContext) -> None:
            sources = unshared_steps(checked, [[t] for t in checked])
            for tensor, source in zip(checked, sources, strict=True):
                self.transport.all_reduce(source, code, ctx, factor=factor)
                copy_to_others([tensor], source)

        return self._carry_out(run, opts, checked)

    @entry_point
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Run one all_gather_single per pair."""
        _check_pairs(outputs, inputs, "all_gather_into_tensor")
        for output, tensor in zip(outputs, inputs, strict=True):
            check_tensor(output, "all_gather_into_tensor", written=True)
            check_tensor(tensor, "all_gather_into_tensor")
            check_parts(output, tensor, self._size, "all_gather_into_tensor", ("the output", "the input"))

        def run(ctx: CallContext) -> None:
            for output, tensor in zip(outputs, unshared_steps(inputs, [[t] for t in outputs]), strict=True):
                self._gather_single(output, tensor, ctx)

        return self._carry_out(run, opts, list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @entry_point
    def allgather_coalesced(self, output_lists: Any, input_list: Sequence[Tensor], opts: Any = None) -> Work:
        """Write rank r's input_list[i] to output_lists[r][i]."""
        if len(output_lists) != self._size:
            raise ArgumentError(
                f"all_gather_coalesced: output lists should be equal to world size: there are {len(output_lists)}, the "
                f"group has {self._size} ranks"
            )
        by_tensor = [
            check_list(
                [outputs[i] for outputs in output_lists],
                self._size,
                tensor,
                "all_gather_coalesced",
                "output_lists",
                written=True,
            )
            for i, tensor in enumerate(check_tensor(t, "all_gather_coalesced") for t in input_list)
        ]
        for i, outputs in enumerate(by_tensor):
            check_apart(input_list[i : i + 1], outputs, "all_gather_coalesced", "output_lists", suffix=f"[{i}]")

        def run(ctx: CallContext) -> None:
            for tensor, outputs in zip(unshared_steps(input_list, by_tensor), by_tensor, strict=True):
                (source,) = unshared([tensor], outputs, own=(0, self._rank, 0))
                self.transport.gather(outputs, source, ctx)

        return self._carry_out(run, opts, [t for outputs in output_lists for t in outputs])

    @entry_point
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Run one reduce_scatter_single per pair."""
        _check_pairs(outputs, inputs, "reduce_scatter_tensor")
        codes = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_tensor(output, "reduce_scatter_tensor", written=True)
            check_tensor(tensor, "reduce_scatter_tensor")
            check_parts(tensor, output, self._size, "reduce_scatter_tensor", ("the input", "the output"))
            codes.append(reduction_of(opts.reduceOp, output.dtype, "reduce_scatter_tensor"))

        def run(ctx: CallContext) -> None:
            sources = unshared_steps(inputs, [[t] for t in outputs])
            for output, tensor, (code, factor) in zip(outputs, sources, codes, strict=True):
                self._reduce_scatter_single(output, tensor, code, factor, ctx)

        return self._carry_out(run, opts, list(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing: operations inside the block are carried out as they come."""

    def _end_coalescing(self, device: torch.device) -> Work:
        """Return a Work that is over when all operations of the block are."""
        return self._carry_out(lambda ctx: None, None, [])


def _check_pairs(outputs: Sequence[Tensor], inputs: Sequence[Tensor], operation: str) -> None:
    if len(outputs) != len(inputs):
        raise ArgumentError(
            f"{operation}: requires input/output tensor lists to have the same length, got {len(inputs)} inputs and "
            f"{len(outputs)} outputs"
        )
