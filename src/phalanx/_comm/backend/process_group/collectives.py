"""Unpack and check the arguments of each collective that c10d calls, and call the transport (`transport/base`).

Each public function is a method of `PhalanxProcessGroup`, listed in its table of calls. Callers may use all of
PyTorch's overloads; the functions receive the first form, with options. As in Gloo, some calls accept several tensors
per rank: early versions of torch passed one per device of a process. A coalesced operation runs one operation per
tensor, on the values from before the call.

Shape: any, contiguous or not; the same number of elements and the same dtype on every rank, except where split
sizes or lists of tensors say otherwise. Results have the shapes of the tensors that they are written to.
Cost: non-contiguous tensors are copied once in, and once out; the transport's methods have their own costs.
Numerics: a reduction has a fixed order, so its result is bitwise identical on every rank and in every run.

Raises:
    ValueError, TypeError: an argument that is wrong whatever the other ranks do; nothing was sent.
    MismatchError: the ranks called different operations, dtypes or sizes; no tensor was changed.
    PeerLostError: a rank died or left; outputs hold undefined values.
    DeadlineError: time ran out; the group can no longer be used.
    ClosedError: this process has left the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from threading import get_ident
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.dtypes import REAL_CODES
from phalanx._comm.backend.arguments import (
    ArgumentError,
    check_alike,
    check_apart,
    check_list,
    check_one_type,
    check_parts,
    check_root,
    check_sparse,
    check_tensor,
    is_sparse,
    one,
    reduction_of,
    split_rows,
    timeout_of,
)
from phalanx._comm.backend.memoryless import FakeCall, work_of_fake_call
from phalanx._comm.backend.overloads import arguments_of_allreduce
from phalanx._comm.backend.process_group.observed import (
    early_modes,
    is_recorded,
    num_modes,
    profiler,
    record,
    transform,
)
from phalanx._comm.diagnostics.call_sites import calling_site
from phalanx._comm.transport import sparse
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.several import (
    can_combine,
    combined,
    copy_to_others,
    unshared,
    unshared_one,
    unshared_steps,
)
from phalanx._comm.transport.tensors import is_plain, nbytes, write_back
from phalanx.errors import DeadlineError

if TYPE_CHECKING:
    from phalanx._comm.backend.process_group.group import PhalanxProcessGroup

c10d: Any = dist.distributed_c10d  # its stubs lack names used here

Work = dist.Work
_SUM: Any = dist.ReduceOp.SUM


def allreduce(
    group: PhalanxProcessGroup,
    tensors: Any = None,
    opts: Any = None,
    timeout: timedelta | None = None,
    op: Any = None,
    tensor: Any = None,
) -> Work:
    """Replace each tensor by the reduction over ranks, and over the tensors of each rank."""
    if (
        num_modes() or early_modes[0] is not None or transform() is not None or profiler._is_profiler_enabled
    ) and not is_recorded():
        seen: Work = record(group, "allreduce", arguments_of_allreduce(tensors, opts, timeout, op, tensor))
        return seen
    # Fast path of the most frequent call: a synchronous sum of one plain tensor. The general code below takes three
    # times as long.
    if type(opts) is c10d.AllreduceOptions and not opts.asyncOp and len(tensors) == 1 and group.is_free():
        only = tensors[0]
        real = REAL_CODES.get(only.dtype)
        if (
            real is not None
            and only.is_cpu
            and only.layout is torch.strided
            and only.is_contiguous()
            and not only.is_neg()
            and type(only) is Tensor
            and only.data_ptr()
            and opts.reduceOp == _SUM
        ):
            callers, me = group.executor.callers, get_ident()
            try:  # inlines `run_here`
                callers.add(me)
                group.transport.sum_in_place(only, real, timeout_of(opts, group.timeout_s), calling_site())
            finally:
                callers.discard(me)
            return group.done_work
    tensors, opts = arguments_of_allreduce(tensors, opts, timeout, op, tensor)
    if not tensors:
        raise ArgumentError("all_reduce: requires non-empty tensor list")
    if any(map(is_sparse, tensors)):
        return _sparse_all_reduce(group, tensors, opts)
    try:
        checked = check_alike(tensors, "all_reduce", written=True)
    except FakeCall:
        return work_of_fake_call("all_reduce", (tensors,))
    code, factor = reduction_of(opts.reduceOp, checked[0].dtype, "all_reduce")
    if len(checked) > 1:
        return _all_reduce_several(group, checked, code, factor, opts)
    only = checked[0]
    return group.carry_out(lambda ctx: group.transport.all_reduce(only, code, ctx, factor=factor), opts, [only])


def _all_reduce_several(group: PhalanxProcessGroup, tensors: list[Tensor], code: int, factor: Any, opts: Any) -> Work:
    if not can_combine(code):
        raise ArgumentError(
            f"all_reduce: {opts.reduceOp} of {len(tensors)} tensors per rank is ambiguous: the mean over ranks, "
            "or over all tensors?\nReduce with SUM, then divide."
        )

    def run(ctx: CallContext) -> None:
        total = combined(tensors, code)
        group.transport.all_reduce(total, code, ctx, factor=factor)
        copy_to_others(tensors, total)

    return group.carry_out(run, opts, tensors)


def _sparse_all_reduce(group: PhalanxProcessGroup, tensors: list[Tensor], opts: Any) -> Work:
    check_sparse(tensors, opts.reduceOp)
    return group.carry_out(lambda ctx: sparse.all_reduce(group.transport, tensors, ctx), opts, tensors)


def sparse_mean(group: PhalanxProcessGroup, tensor: Tensor) -> Tensor:
    """Return the mean over ranks of a coalesced sparse CPU tensor, on every rank; the inputs stay unchanged.

    The call waits for the result. c10d has no all_reduce with AVG for sparse tensors; unlike c10d's all_reduce, this
    does not copy the result into `tensor`.
    """
    ctx = group.call_context(None)
    return group.in_order(lambda: sparse.add_up(group.transport, tensor, ctx, divisor=group.members.size))


def broadcast(group: PhalanxProcessGroup, tensors: Any, opts: Any = None) -> Work:
    """Overwrite each tensor with the root's tensor; if the root has several, with tensor number `opts.rootTensor`."""
    root = check_root(opts, group.members.size, "broadcast", "src", len(tensors))
    checked = check_alike(tensors, "broadcast", written=True)
    own = checked[opts.rootTensor if root == group.members.rank else 0]

    def run(ctx: CallContext) -> None:
        source = own if len(checked) == 1 else own.detach().clone()  # `checked` may share memory
        group.transport.broadcast(source, root, ctx)
        copy_to_others(checked, source)

    return group.carry_out(run, opts, checked)


def broadcast_buffers(group: PhalanxProcessGroup, tensor: Tensor, root: int, *, number: int = 0) -> None:
    """Overwrite `tensor` with the tensor of `root`. The root does not wait; the other ranks wait only for the root.

    This is for a frequent broadcast, for example of a module's buffers before each forward pass: no rank waits for the
    slowest rank. The group's next collective checks that all ranks made this call. So a mismatch, or a lost or late
    rank, is reported only then, when `tensor` may already hold the root's values. Ranks must share memory.

    Arguments:
        tensor: any shape, the same number of bytes on all ranks; best contiguous.
        number: a value that must be the same on all ranks, such as the step number.

    Cost: two copies. More than 128 KiB are copied through two areas of that size; the first call allocates them, and
        waits for all ranks.
    """
    tensor = one(tensor, "broadcast_buffers", written=True)
    opts = c10d.BroadcastOptions()
    opts.rootRank, opts.asyncOp = root, False
    check_root(opts, group.members.size, "broadcast_buffers", "src")
    memory = group.shared_memory
    if memory is None:
        raise ArgumentError(f"broadcast_buffers: the ranks of group {group.group_name!r} do not share memory")
    group.carry_out(lambda span: memory.broadcast_buffers(tensor, root, span, number=number), opts, [tensor]).wait()


def reduce(group: PhalanxProcessGroup, tensors: Any, opts: Any = None) -> Work:
    """Replace the root's tensor by the reduction over ranks; the other tensors stay unchanged."""
    root = check_root(opts, group.members.size, "reduce", "dst", len(tensors))
    tensor = one(tensors, "reduce", written=True)
    code, factor = reduction_of(opts.reduceOp, tensor.dtype, "reduce")
    return group.carry_out(
        lambda ctx: group.transport.all_reduce(tensor, code, ctx, root=root, factor=factor), opts, [tensor]
    )


def allgather(group: PhalanxProcessGroup, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
    """Write rank r's input to output_tensors[0][r]; the outputs may differ in size from rank to rank.

    With n inputs per rank, each list of outputs receives the inputs of all ranks, rank by rank.
    """
    if not input_tensors:
        raise ArgumentError("all_gather: requires non-empty input tensor list")
    if len(output_tensors) != len(input_tensors):
        raise ArgumentError(
            f"all_gather: requires input/output tensor lists to have the same length, got {len(input_tensors)} "
            f"inputs and {len(output_tensors)} lists of outputs"
        )
    if len(input_tensors) > 1:
        return _all_gather_several(group, output_tensors, input_tensors, opts)
    tensor = one(input_tensors, "all_gather")
    outputs = check_list(
        output_tensors[0], group.members.size, tensor, "all_gather", "tensor_list", uneven=True, written=True
    )
    rank = group.members.rank
    if outputs[rank].numel() != tensor.numel():
        raise ArgumentError(
            f"all_gather: invalid tensor size at index {rank}: tensor_list[{rank}] has "
            f"{outputs[rank].numel()} elements, this rank's tensor of shape {tuple(tensor.shape)} has "
            f"{tensor.numel()}"
        )
    apart = check_apart([tensor], outputs, "all_gather", "tensor_list")

    def run(ctx: CallContext) -> None:
        source = tensor if apart else unshared([tensor], outputs, own=(0, group.members.rank, 0))[0]
        group.transport.gather(outputs, source, ctx)

    return group.carry_out(run, opts, outputs)


def _all_gather_several(group: PhalanxProcessGroup, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
    inputs = check_alike(input_tensors, "all_gather")
    count = group.members.size * len(inputs)
    lists = [
        check_list(outputs, count, inputs[0], "all_gather", f"output_tensors[{i}]", written=True)
        for i, outputs in enumerate(output_tensors)
    ]

    def run(ctx: CallContext) -> None:
        rows = [torch.empty((group.members.size, t.numel()), dtype=t.dtype, device=t.device) for t in inputs]
        for row, tensor in zip(rows, inputs, strict=True):
            group.transport.all_gather_single(row, tensor, ctx)
        for outputs in lists:
            for at, output in enumerate(outputs):
                rank, i = divmod(at, len(inputs))
                write_back(output, rows[i][rank].view(output.shape))

    return group.carry_out(run, opts, lists)


def all_gather_single(group: PhalanxProcessGroup, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
    """Write all ranks' tensors to `output`, one after the other."""
    check_tensor(output, "all_gather_into_tensor", written=True)
    check_tensor(tensor, "all_gather_into_tensor")
    check_parts(output, tensor, group.members.size, "all_gather_into_tensor", ("the output", "the input"))
    return group.carry_out(lambda ctx: _gather_single(group, output, tensor, ctx), opts, [output])


def _gather_single(group: PhalanxProcessGroup, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
    source = unshared_one(tensor, output, group.members.rank * nbytes(tensor))
    group.transport.all_gather_single(output, source, ctx)


def gather(group: PhalanxProcessGroup, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
    """Write rank r's input to output_tensors[0][r] on the root."""
    root = check_root(opts, group.members.size, "gather", "dst")
    tensor = one(input_tensors, "gather", words="requires a single-element input tensor list")
    outputs: list[Tensor] = []
    if root == group.members.rank:
        if len(output_tensors) != 1:
            raise ArgumentError(
                f"gather: requires a single-element output list on the dst rank, got {len(output_tensors)} lists"
            )
        outputs = check_list(output_tensors[0], group.members.size, tensor, "gather", "gather_list", written=True)
    elif output_tensors:
        raise ArgumentError(
            f"gather: requires empty output on non-root: only rank {root} (dst) takes outputs, but "
            f"rank {group.members.rank} passed some"
        )
    apart = check_apart([tensor], outputs, "gather", "gather_list")

    def run(ctx: CallContext) -> None:
        source = tensor if apart else unshared([tensor], outputs, own=(0, group.members.rank, 0))[0]
        group.transport.gather(outputs, source, ctx, root=root)

    return group.carry_out(run, opts, outputs)


def gather_single(group: PhalanxProcessGroup, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
    """Write all ranks' tensors to `output` on the root, one after the other: a `gather` into its parts."""
    opts = c10d.GatherOptions() if opts is None else opts
    if check_root(opts, group.members.size, "gather_single", "dst") != group.members.rank:
        return cast(Work, group.gather([], [tensor], opts))
    check_parts(output, tensor, group.members.size, "gather_single", ("the output", "the input"))
    if not output.is_contiguous():
        raise ArgumentError(f"gather_single: the output of strides {output.stride()} is not contiguous")
    parts = list(output.detach().view(group.members.size, *tensor.shape).unbind())
    return cast(Work, group.gather([parts], [tensor], opts))


def scatter(group: PhalanxProcessGroup, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
    """Write the root's input_tensors[0][r] to the output of rank r."""
    root = check_root(opts, group.members.size, "scatter", "src")
    output = one(output_tensors, "scatter", words="requires a single-element output tensor list", written=True)
    inputs: list[Tensor] = []
    if root == group.members.rank:
        if len(input_tensors) != 1:
            raise ArgumentError(
                f"scatter: requires a single-element input list on the src rank, got {len(input_tensors)} lists"
            )
        inputs = check_list(input_tensors[0], group.members.size, output, "scatter", "scatter_list")
    elif input_tensors:
        raise ArgumentError(
            f"scatter: requires empty input on non-root: only rank {root} (src) takes inputs, but "
            f"rank {group.members.rank} passed some"
        )

    def run(ctx: CallContext) -> None:
        group.transport.scatter(output, unshared(inputs, [output], own=(group.members.rank, 0, 0)), root, ctx)

    return group.carry_out(run, opts, [output])


def reduce_scatter(group: PhalanxProcessGroup, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
    """Write the reduction over ranks of input_tensors[0][rank] to the output; the inputs may differ in size."""
    words = "requires a single-element output tensor list"
    output = one(output_tensors, "reduce_scatter", words=words, written=True)
    if len(input_tensors) != 1:
        raise ArgumentError(f"reduce_scatter: requires a single-element input list, got {len(input_tensors)} lists")
    inputs = check_list(input_tensors[0], group.members.size, output, "reduce_scatter", "input_list", uneven=True)
    rank = group.members.rank
    if inputs[rank].numel() != output.numel():
        raise ArgumentError(
            f"reduce_scatter: invalid tensor size at index {rank}: input_list[{rank}] has "
            f"{inputs[rank].numel()} elements, the output of shape {tuple(output.shape)} has {output.numel()}"
        )
    code, factor = reduction_of(opts.reduceOp, output.dtype, "reduce_scatter")

    def run(ctx: CallContext) -> None:
        sources = unshared(inputs, [output], own=(group.members.rank, 0, 0))
        group.transport.reduce_scatter(output, sources, code, ctx, factor=factor)

    return group.carry_out(run, opts, [output])


def reduce_scatter_single(group: PhalanxProcessGroup, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
    """Write the reduction over ranks of this rank's part of `tensor` to the output."""
    check_tensor(output, "reduce_scatter_tensor", written=True)
    check_tensor(tensor, "reduce_scatter_tensor")
    check_parts(tensor, output, group.members.size, "reduce_scatter_tensor", ("the input", "the output"))
    code, factor = reduction_of(opts.reduceOp, output.dtype, "reduce_scatter_tensor")
    return group.carry_out(lambda ctx: _reduce_scatter_single(group, output, tensor, code, factor, ctx), opts, [output])


def _reduce_scatter_single(
    group: PhalanxProcessGroup, output: Tensor, tensor: Tensor, code: int, factor: Any, ctx: CallContext
) -> None:
    source = unshared_one(tensor, output, -group.members.rank * nbytes(output))
    group.transport.reduce_scatter_single(output, source, code, ctx, factor=factor)


def alltoall(
    group: PhalanxProcessGroup, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: Any = None
) -> Work:
    """Write rank r's input_tensors[rank] to output_tensors[r]; sizes may differ from pair to pair."""
    if not input_tensors:
        raise ArgumentError(f"all_to_all: no input tensors, the group has {group.members.size} ranks")
    like = check_tensor(input_tensors[0], "all_to_all")
    inputs = check_list(input_tensors, group.members.size, like, "all_to_all", "input_tensor_list", uneven=True)
    outputs = check_list(
        output_tensors, group.members.size, like, "all_to_all", "output_tensor_list", uneven=True, written=True
    )
    apart = check_apart(inputs, outputs, "all_to_all", "output_tensor_list")

    def run(ctx: CallContext) -> None:
        group.transport.all_to_all(outputs, inputs if apart else unshared(inputs, outputs), ctx, splits=True)

    return group.carry_out(run, opts, outputs)


def all_to_all_single(
    group: PhalanxProcessGroup,
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    opts: Any = None,
) -> Work:
    """Write this rank's part of the rows of rank r's tensor to part r of the rows of `output`."""
    check_tensor(output, "all_to_all_single", written=True)
    check_tensor(tensor, "all_to_all_single")
    if output.dtype != tensor.dtype:
        raise ArgumentError(f"all_to_all_single: the output is {output.dtype}, the input is {tensor.dtype}")
    splits = bool(input_split_sizes or output_split_sizes)
    if not splits and output.numel() != tensor.numel():
        raise ArgumentError(
            f"all_to_all_single: the output has {output.numel()} elements, the input {tensor.numel()}; "
            "pass split sizes if they differ"
        )
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits and rows % group.members.size == 0 and is_plain(tensor) and is_plain(output):

        def run_plain(ctx: CallContext) -> None:
            group.transport.all_to_all_single(output, unshared([tensor], [output])[0], ctx)

        return group.carry_out(run_plain, opts, [output])
    # The output must be contiguous, so that each rank's rows are one piece of memory.
    dense = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype, device="cpu")
    inputs = split_rows(tensor, input_split_sizes or [], group.members.size, "all_to_all_single", "the input")
    outputs = split_rows(dense, output_split_sizes or [], group.members.size, "all_to_all_single", "the output")

    def run(ctx: CallContext) -> None:
        group.transport.all_to_all(outputs, unshared(inputs, outputs), ctx, splits=splits)
        write_back(output, dense)

    return group.carry_out(run, opts, [output])


def barrier(group: PhalanxProcessGroup, opts: Any = None) -> Work:
    """Return a work that completes when every rank has called this."""
    return group.carry_out(lambda ctx: group.transport.barrier(ctx), opts, [])


def monitored_barrier(
    group: PhalanxProcessGroup, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait for all ranks; the error names the missing ranks, and begins with the text of Gloo's monitored barrier.

    The first line names one missing rank, or with `wait_all_ranks` all of them; the other lines always name all.
    """
    opts = c10d.BarrierOptions()
    opts.asyncOp = False
    if timeout is not None:
        opts.timeout = max(timeout, timedelta(milliseconds=1))  # zero would mean "unset"
    try:
        group.carry_out(lambda ctx: group.transport.barrier(ctx), opts, []).wait()
    except DeadlineError as error:
        raise _in_torchs_words(error, group.members.rank, wait_all_ranks=wait_all_ranks) from None


def allreduce_coalesced(group: PhalanxProcessGroup, tensors: Sequence[Tensor], opts: Any = None) -> Work:
    """Reduce each tensor; the inputs are the values from before the call, even if tensors share memory."""
    if not tensors:
        raise ArgumentError("all_reduce_coalesced: requires non-empty tensor list")
    checked = check_one_type(tensors, "all_reduce_coalesced")
    code, factor = reduction_of(opts.reduceOp, checked[0].dtype, "all_reduce_coalesced")

    def run(ctx: CallContext) -> None:
        sources = unshared_steps(checked, [[t] for t in checked])
        for tensor, source in zip(checked, sources, strict=True):
            group.transport.all_reduce(source, code, ctx, factor=factor)
            copy_to_others([tensor], source)

    return group.carry_out(run, opts, checked)


def all_gather_single_coalesced(
    group: PhalanxProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
) -> Work:
    """Run one all_gather_single per pair."""
    _check_pairs(outputs, inputs, "all_gather_into_tensor")
    for output, tensor in zip(outputs, inputs, strict=True):
        check_tensor(output, "all_gather_into_tensor", written=True)
        check_tensor(tensor, "all_gather_into_tensor")
        check_parts(output, tensor, group.members.size, "all_gather_into_tensor", ("the output", "the input"))

    def run(ctx: CallContext) -> None:
        for output, tensor in zip(outputs, unshared_steps(inputs, [[t] for t in outputs]), strict=True):
            _gather_single(group, output, tensor, ctx)

    return group.carry_out(run, opts, list(outputs))


def allgather_coalesced(
    group: PhalanxProcessGroup, output_lists: Any, input_list: Sequence[Tensor], opts: Any = None
) -> Work:
    """Write rank r's input_list[i] to output_lists[r][i]."""
    if len(output_lists) != group.members.size:
        raise ArgumentError(
            f"all_gather_coalesced: output lists should be equal to world size: there are {len(output_lists)}, the "
            f"group has {group.members.size} ranks"
        )
    for rank, outputs in enumerate(output_lists):
        if len(outputs) != len(input_list):
            raise ArgumentError(
                f"all_gather_coalesced: output_lists[{rank}] has {len(outputs)} tensors, but there are "
                f"{len(input_list)} input tensors"
            )
    by_tensor = [
        check_list(
            [outputs[i] for outputs in output_lists],
            group.members.size,
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
            (source,) = unshared([tensor], outputs, own=(0, group.members.rank, 0))
            group.transport.gather(outputs, source, ctx)

    return group.carry_out(run, opts, [t for outputs in output_lists for t in outputs])


def reduce_scatter_single_coalesced(
    group: PhalanxProcessGroup, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
) -> Work:
    """Run one reduce_scatter_single per pair."""
    _check_pairs(outputs, inputs, "reduce_scatter_tensor")
    codes = []
    for output, tensor in zip(outputs, inputs, strict=True):
        check_tensor(output, "reduce_scatter_tensor", written=True)
        check_tensor(tensor, "reduce_scatter_tensor")
        check_parts(tensor, output, group.members.size, "reduce_scatter_tensor", ("the input", "the output"))
        codes.append(reduction_of(opts.reduceOp, output.dtype, "reduce_scatter_tensor"))

    def run(ctx: CallContext) -> None:
        sources = unshared_steps(inputs, [[t] for t in outputs])
        for output, tensor, (code, factor) in zip(outputs, sources, codes, strict=True):
            _reduce_scatter_single(group, output, tensor, code, factor, ctx)

    return group.carry_out(run, opts, list(outputs))


def _check_pairs(outputs: Sequence[Tensor], inputs: Sequence[Tensor], operation: str) -> None:
    if len(outputs) != len(inputs):
        raise ArgumentError(
            f"{operation}: requires input/output tensor lists to have the same length, got {len(inputs)} inputs and "
            f"{len(outputs)} outputs"
        )


def _in_torchs_words(error: DeadlineError, rank: int, *, wait_all_ranks: bool) -> DeadlineError:
    """Return a barrier's `error` with the first line of an error of Gloo's monitored barrier added."""
    missing = error.missing if wait_all_ranks else error.missing[:1]
    who = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    failed = f"; {who} failed to pass monitoredBarrier" if missing else ""
    return DeadlineError(f"Rank {rank} timed out in monitoredBarrier{failed}.\n{error}", missing=error.missing)
