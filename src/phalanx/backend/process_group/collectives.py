"""The collectives as c10d calls them: unpack, check, carry out. What they do is the transport's: `transport/base`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.autograd.profiler as profiler
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from phalanx.backend.arguments import (
    check_list,
    check_parts,
    check_rank,
    check_sparse,
    check_tensor,
    one,
    reduction_of,
    split_rows,
    timeout_of,
)
from phalanx.backend.dynamo import untraced
from phalanx.backend.memoryless import FakeCall, nothing_done, without_fakes
from phalanx.backend.process_group.base import ProcessGroupBase
from phalanx.backend.process_group.observed import early_modes, is_recorded, num_modes, observed, record, transform
from phalanx.diagnostics.call_sites import calling_site
from phalanx.dtypes import REAL_CODES
from phalanx.errors import DeadlineError
from phalanx.transport import sparse
from phalanx.transport.base import CallContext
from phalanx.transport.tensors import is_plain, write_back

Work = dist.Work
_SUM: Any = dist.ReduceOp.SUM


def _options(options: Any, kind: type, timeout: timedelta | None = None) -> Any:
    """`options` as c10d gives them; a bare reduction or None, as people give them, is wrapped."""
    if isinstance(options, kind):
        return options
    made = kind()
    made.asyncOp = True
    if options is not None:
        made.reduceOp = options if isinstance(options, dist.ReduceOp) else dist.ReduceOp(options)
    if timeout is not None:
        made.timeout = timeout
    return made


@untraced
@observed
class ProcessGroupCollectives(ProcessGroupBase):
    """Every collective of `torch.distributed`, on CPU tensors.

    Lists hold one tensor per call, as c10d's signatures want (several belong to torch's multi-device past).

    Shape: any, contiguous or not; the same number of elements and the same dtype on every rank, except where split
    sizes or lists of tensors say otherwise. Results have the shapes of the tensors that they are written to.
    Cost: tensors whose elements do not lie in order in memory are copied once in, and once out; what the transport
    does costs what its methods say.
    Numerics: a reduction has a fixed order: the same bits on every rank and in every run.

    Raises:
        ValueError, TypeError: an argument that is wrong whatever the other ranks do; nothing was sent.
        MismatchError: the ranks called different operations, dtypes or sizes; no tensor was changed.
        PeerLostError: a rank died or left; outputs hold undefined values.
        DeadlineError: time ran out; the group can no longer be used.
        ClosedError: this process has left the group.
    """

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Each tensor becomes the reduction over ranks."""
        if (
            num_modes() or early_modes[0] is not None or transform() is not None or profiler._is_profiler_enabled
        ) and not is_recorded():
            seen: Work = record(self, "allreduce", (tensors, *(a for a in (opts, timeout) if a is not None)), {})
            return seen
        # The call that everybody makes, without a detour: a sum of one plain tensor that is waited for. The general
        # way below does the same in three times the time.
        if type(opts) is c10d.AllreduceOptions and not opts.asyncOp and len(tensors) == 1 and self._is_free():
            tensor = tensors[0]
            real = REAL_CODES.get(tensor.dtype)
            if (
                real is not None
                and tensor.is_cpu
                and tensor.layout is torch.strided
                and tensor.is_contiguous()
                and not tensor.is_neg()
                and type(tensor) is Tensor
                and tensor.data_ptr()
                and opts.reduceOp == _SUM
            ):
                self.transport.sum_in_place(tensor, real, timeout_of(opts, self._timeout_s), calling_site())
                return self._done
        opts = _options(opts, c10d.AllreduceOptions, timeout)
        if isinstance(tensors, Sequence) and len(tensors) == 1 and _is_sparse(tensors[0]):
            return self._sparse_all_reduce(tensors[0], opts)
        try:
            tensor = one(tensors, "all_reduce", written=True)
        except FakeCall:
            return nothing_done("all_reduce", (tensors,))
        code, factor = reduction_of(opts.reduceOp, tensor.dtype, "all_reduce")
        return self._carry_out(lambda ctx: self.transport.all_reduce(tensor, code, ctx, factor=factor), opts, [tensor])

    def _sparse_all_reduce(self, tensor: Tensor, opts: Any) -> Work:
        check_sparse(tensor, opts.reduceOp)
        return self._carry_out(lambda ctx: sparse.all_reduce(self.transport, tensor, ctx), opts, [tensor])

    def sparse_mean(self, tensor: Tensor) -> Tensor:
        """The mean over ranks of a coalesced sparse CPU tensor, on every rank; the inputs stay as they are. It waits.

        As an all_reduce with AVG, which sparse tensors do not have, without c10d's way there and a copy of the result.
        """
        ctx = self._call_context(None, 4)
        return self.in_order(lambda: sparse.add_up(self.transport, tensor, ctx, divisor=self._size))

    @without_fakes
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """As one all_reduce per tensor."""
        opts = _options(opts, c10d.AllreduceCoalescedOptions)
        checked = [check_tensor(t, "all_reduce_coalesced", written=True) for t in tensors]
        codes = [reduction_of(opts.reduceOp, t.dtype, "all_reduce_coalesced") for t in checked]

        def run(ctx: CallContext) -> None:
            for tensor, (code, factor) in zip(checked, codes, strict=True):
                self.transport.all_reduce(tensor, code, ctx, factor=factor)

        return self._carry_out(run, opts, checked)

    @without_fakes
    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        """Each tensor becomes the root's."""
        if not isinstance(opts, c10d.BroadcastOptions):
            root = opts or 0
            opts = c10d.BroadcastOptions()
            opts.rootRank = root
            opts.asyncOp = True
        tensor = one(tensors, "broadcast", written=True)
        root = check_rank(opts.rootRank, self._size, "broadcast", "src")
        return self._carry_out(lambda ctx: self.transport.broadcast(tensor, root, ctx), opts, [tensor])

    def broadcast_buffers(self, tensor: Tensor, root: int, *, number: int = 0) -> None:
        """`tensor` becomes rank `root`'s, which goes on at once; the others wait for that rank alone.

        For a broadcast that is made again and again, as of a module's buffers before each forward: no rank waits for
        the slowest there. Whether all ranks called it is asked when the next collective of the group begins, so a
        mismatch, a rank that is gone or late is told then, of this call; by then `tensor` may be the root's already.
        Only where ranks share memory.

        Arguments:
            tensor: any shape, the same number of bytes on all ranks; best contiguous.
            number: whatever must be the same on all ranks, such as the number of the step.

        Cost: two copies. More than 128 KiB go through two areas of that size, which the first call allocates, and that
        call waits for all ranks.
        """
        tensor = one(tensor, "broadcast_buffers", written=True)
        root = check_rank(root, self._size, "broadcast_buffers", "src")
        opts = c10d.BroadcastOptions()
        opts.asyncOp = False
        memory = self._shared_memory
        if memory is None:
            raise ValueError(f"broadcast_buffers: the ranks of group {self._name!r} do not share memory")
        self._carry_out(lambda span: memory.broadcast_buffers(tensor, root, span, number=number), opts, [tensor]).wait()

    @without_fakes
    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        """The root's tensor becomes the reduction over ranks; the others keep theirs."""
        opts = _options(opts, c10d.ReduceOptions)
        tensor = one(tensors, "reduce", written=True)
        root = check_rank(opts.rootRank, self._size, "reduce", "dst")
        code, factor = reduction_of(opts.reduceOp, tensor.dtype, "reduce")
        return self._carry_out(
            lambda ctx: self.transport.all_reduce(tensor, code, ctx, root=root, factor=factor), opts, [tensor]
        )

    @without_fakes
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """output_tensors[0][r] becomes rank r's input; the outputs may differ in size from rank to rank."""
        opts = _options(opts, c10d.AllgatherOptions)
        tensor = one(input_tensors, "all_gather")
        lists = output_tensors if isinstance(output_tensors[0], Sequence) else [output_tensors]
        outputs = check_list(lists[0], self._size, tensor, "all_gather", "tensor_list", uneven=True, written=True)
        if outputs[self._rank].numel() != tensor.numel():
            raise ValueError(
                f"all_gather: tensor_list[{self._rank}] has {outputs[self._rank].numel()} elements, this rank's tensor "
                f"of shape {tuple(tensor.shape)} has {tensor.numel()}"
            )
        return self._carry_out(lambda ctx: self.transport.gather(outputs, tensor, ctx), opts, outputs)

    @without_fakes
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """`output` becomes all ranks' tensors, one after the other."""
        opts = _options(opts, c10d.AllgatherOptions)
        check_tensor(output, "all_gather_into_tensor", written=True)
        check_tensor(tensor, "all_gather_into_tensor")
        check_parts(output, tensor, self._size, "all_gather_into_tensor", ("the output", "the input"))
        return self._carry_out(lambda ctx: self.transport.all_gather_single(output, tensor, ctx), opts, [output])

    _allgather_base = all_gather_single

    @without_fakes
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """As one all_gather_single per pair."""
        opts = _options(opts, c10d.AllgatherOptions)
        for output, tensor in zip(outputs, inputs, strict=True):
            check_tensor(output, "all_gather_into_tensor", written=True)
            check_tensor(tensor, "all_gather_into_tensor")
            check_parts(output, tensor, self._size, "all_gather_into_tensor", ("the output", "the input"))

        def run(ctx: CallContext) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self.transport.all_gather_single(output, tensor, ctx)

        return self._carry_out(run, opts, list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @without_fakes
    def allgather_coalesced(self, output_lists: Any, input_list: Sequence[Tensor], opts: Any = None) -> Work:
        """output_lists[r][i] becomes rank r's input_list[i]."""
        opts = _options(opts, c10d.AllgatherOptions)
        if len(output_lists) != self._size:
            raise ValueError(f"all_gather_coalesced: {len(output_lists)} lists, the group has {self._size} ranks")
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

        def run(ctx: CallContext) -> None:
            for tensor, outputs in zip(input_list, by_tensor, strict=True):
                self.transport.gather(outputs, tensor, ctx)

        return self._carry_out(run, opts, [t for outputs in output_lists for t in outputs])

    @without_fakes
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """On the root output_tensors[0][r] becomes rank r's input."""
        opts = _options(opts, c10d.GatherOptions)
        tensor = one(input_tensors, "gather")
        root = check_rank(opts.rootRank, self._size, "gather", "dst")
        outputs: list[Tensor] = []
        if root == self._rank:
            if len(output_tensors) != 1:
                raise ValueError("gather: the dst rank needs one list of outputs")
            outputs = check_list(output_tensors[0], self._size, tensor, "gather", "gather_list", written=True)
        elif output_tensors:
            raise ValueError(f"gather: only rank {root} (dst) takes outputs, rank {self._rank} gave some")
        return self._carry_out(lambda ctx: self.transport.gather(outputs, tensor, ctx, root=root), opts, outputs)

    @without_fakes
    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Each output becomes the root's input_tensors[0][rank]."""
        opts = _options(opts, c10d.ScatterOptions)
        output = one(output_tensors, "scatter", written=True)
        root = check_rank(opts.rootRank, self._size, "scatter", "src")
        inputs: list[Tensor] = []
        if root == self._rank:
            if len(input_tensors) != 1:
                raise ValueError("scatter: the src rank needs one list of inputs")
            inputs = check_list(input_tensors[0], self._size, output, "scatter", "scatter_list")
        elif input_tensors:
            raise ValueError(f"scatter: only rank {root} (src) gives inputs, rank {self._rank} gave some")
        return self._carry_out(lambda ctx: self.transport.scatter(output, inputs, root, ctx), opts, [output])

    @without_fakes
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """The output becomes the reduction over ranks of input_tensors[0][rank]; the inputs may differ in size."""
        opts = _options(opts, c10d.ReduceScatterOptions)
        output = one(output_tensors, "reduce_scatter", written=True)
        lists = input_tensors if isinstance(input_tensors[0], Sequence) else [input_tensors]
        inputs = check_list(lists[0], self._size, output, "reduce_scatter", "input_list", uneven=True)
        if inputs[self._rank].numel() != output.numel():
            raise ValueError(
                f"reduce_scatter: input_list[{self._rank}] has {inputs[self._rank].numel()} elements, the output of "
                f"shape {tuple(output.shape)} has {output.numel()}"
            )
        code, factor = reduction_of(opts.reduceOp, output.dtype, "reduce_scatter")
        return self._carry_out(
            lambda ctx: self.transport.reduce_scatter(output, inputs, code, ctx, factor=factor), opts, [output]
        )

    @without_fakes
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """The output becomes the reduction over ranks of this rank's part of the tensor."""
        opts = _options(opts, c10d.ReduceScatterOptions)
        check_tensor(output, "reduce_scatter_tensor", written=True)
        check_tensor(tensor, "reduce_scatter_tensor")
        check_parts(tensor, output, self._size, "reduce_scatter_tensor", ("the input", "the output"))
        code, factor = reduction_of(opts.reduceOp, output.dtype, "reduce_scatter_tensor")
        return self._carry_out(
            lambda ctx: self.transport.reduce_scatter_single(output, tensor, code, ctx, factor=factor), opts, [output]
        )

    _reduce_scatter_base = reduce_scatter_single

    @without_fakes
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """As one reduce_scatter_single per pair."""
        opts = _options(opts, c10d.ReduceScatterOptions)
        codes = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_tensor(output, "reduce_scatter_tensor", written=True)
            check_tensor(tensor, "reduce_scatter_tensor")
            check_parts(tensor, output, self._size, "reduce_scatter_tensor", ("the input", "the output"))
            codes.append(reduction_of(opts.reduceOp, output.dtype, "reduce_scatter_tensor"))

        def run(ctx: CallContext) -> None:
            for output, tensor, (code, factor) in zip(outputs, inputs, codes, strict=True):
                self.transport.reduce_scatter_single(output, tensor, code, ctx, factor=factor)

        return self._carry_out(run, opts, list(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @without_fakes
    def alltoall(self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """output_tensors[r] becomes rank r's input_tensors[rank]; sizes may differ from pair to pair."""
        opts = _options(opts, c10d.AllToAllOptions)
        if not input_tensors:
            raise ValueError(f"all_to_all: no input tensors, the group has {self._size} ranks")
        like = check_tensor(input_tensors[0], "all_to_all")
        inputs = check_list(input_tensors, self._size, like, "all_to_all", "input_tensor_list", uneven=True)
        outputs = check_list(
            output_tensors, self._size, like, "all_to_all", "output_tensor_list", uneven=True, written=True
        )
        return self._carry_out(lambda ctx: self.transport.all_to_all(outputs, inputs, ctx, splits=True), opts, outputs)

    @without_fakes
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """Rows of `output` from rank r become the rows that rank r's tensor holds for this rank."""
        opts = _options(opts, c10d.AllToAllOptions)
        check_tensor(output, "all_to_all_single", written=True)
        check_tensor(tensor, "all_to_all_single")
        if output.dtype != tensor.dtype:
            raise ValueError(f"all_to_all_single: the output is {output.dtype}, the input is {tensor.dtype}")
        splits = bool(input_split_sizes or output_split_sizes)
        if not splits and output.numel() != tensor.numel():
            raise ValueError(
                f"all_to_all_single: the output has {output.numel()} elements, the input {tensor.numel()}; "
                "give split sizes when they differ"
            )
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits and rows % self._size == 0 and is_plain(tensor) and is_plain(output):
            return self._carry_out(lambda ctx: self.transport.all_to_all_single(output, tensor, ctx), opts, [output])
        # A copy with its elements in order, so that rows of it are pieces of memory.
        dense = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
        inputs = split_rows(tensor, input_split_sizes or [], self._size, "all_to_all_single", "the input")
        outputs = split_rows(dense, output_split_sizes or [], self._size, "all_to_all_single", "the output")

        def run(ctx: CallContext) -> None:
            self.transport.all_to_all(outputs, inputs, ctx, splits=splits)
            if dense is not output:
                write_back(output, dense)

        return self._carry_out(run, opts, [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        """Over when every rank has come."""
        opts = _options(opts, c10d.BarrierOptions)
        return self._carry_out(lambda ctx: self.transport.barrier(ctx), opts, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names who did not come, as every error of this backend does; the words are Gloo's.

        `wait_all_ranks` says whether the first line names all missing ranks or the first; what follows names all.
        """
        opts = c10d.BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = max(timeout, timedelta(milliseconds=1))  # no time at all would read as "unset"
        try:
            self._carry_out(lambda ctx: self.transport.barrier(ctx), opts, []).wait()
        except DeadlineError as error:
            raise _in_torchs_words(error, self._rank, wait_all_ranks=wait_all_ranks) from None

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing to open: operations inside the block are carried out as they come."""

    def _end_coalescing(self, device: torch.device) -> Work:
        """Over when all operations of the block are."""
        return self._carry_out(lambda ctx: None, None, [])


def _is_sparse(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout == torch.sparse_coo


def _in_torchs_words(error: DeadlineError, rank: int, *, wait_all_ranks: bool) -> DeadlineError:
    """`error` of a barrier, below the sentence with which Gloo's monitored barrier begins."""
    missing = error.missing if wait_all_ranks else error.missing[:1]
    who = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    failed = f"; {who} failed to pass monitoredBarrier" if missing else ""
    return DeadlineError(f"Rank {rank} timed out in monitoredBarrier{failed}.\n{error}", missing=error.missing)
