"""`MpiTransport` carries a group over MPI: each collective is one of MPI's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from phalanx.deadline import Deadline
from phalanx.diagnostics.failure_report import Operation, RankCall
from phalanx.dtypes import dtype_name, dtype_of
from phalanx.engines.mpi import Underway
from phalanx.transport.base import CallContext
from phalanx.transport.call import Call, Disagreement, compare_splits, describe_call
from phalanx.transport.mpi.datatypes import datatype_of, element_of, operation_of, summand
from phalanx.transport.mpi.session import MpiSession
from phalanx.transport.numerics import divide
from phalanx.transport.tensors import alias, dense, nbytes, scaled, write_back


class MpiTransport(MpiSession):
    """It starts each collective of MPI without waiting, and asks for it until it is over.

    Numerics: MPI adds up, in an order of its own: the same for the same job, perhaps another for another number of
    ranks. Half types add up in float32 and are rounded once; AVG divides the sum once.
    Cost: one all_gather of 256 bytes a rank, in which the ranks agree, then MPI's own. Tensors whose elements lie in
    order in memory are not copied, except into and out of the lists of all_gather, gather, scatter, all_to_all and
    reduce_scatter, and half types.
    """

    # -- reductions ----------------------------------------------------------------------------------------------

    def barrier(self, ctx: CallContext) -> None:
        """Return when every rank has come: the agreement is a barrier already."""
        with self._collective(Call("barrier", place=self._place(ctx)), ctx):
            pass

    def all_reduce(self, tensor: Tensor, redop: int, ctx: CallContext, *, root: int = -1, factor: Any = None) -> None:
        tensor = alias(tensor)
        call = describe_call("all_reduce" if root < 0 else "reduce", tensor, self._place(ctx), redop=redop, root=root)
        with self._collective(call, ctx) as deadline:
            work = summand(dense(scaled(tensor, factor)))
            operation = operation_of(self._mpi, redop, tensor.dtype)
            data, in_place = self._reducible(work), self._mpi.IN_PLACE
            if root < 0:
                self._run(lambda comm: comm.Iallreduce(in_place, data, operation), work, deadline)
            elif root == self.rank:
                self._run(lambda comm: comm.Ireduce(in_place, data, operation, root), work, deadline)
            else:
                self._run(lambda comm: comm.Ireduce(data, None, operation, root), work, deadline)
            if root in (-1, self.rank):
                self._give(tensor, work, redop)

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        output = alias(output)
        counts = [t.numel() for t in inputs]
        call = describe_call(
            "reduce_scatter", output, self._place(ctx), redop=redop, count=sum(counts), sizes=tuple(counts)
        )
        with self._collective(call, ctx) as deadline:
            whole = summand(torch.cat([dense(scaled(alias(t), factor)).view(-1) for t in inputs]))
            part = torch.empty(counts[self.rank], dtype=whole.dtype)
            operation = operation_of(self._mpi, redop, output.dtype)
            sent, received = self._reducible(whole), self._reducible(part)
            self._run(
                lambda comm: comm.Ireduce_scatter(sent, received, counts, operation), (whole, part, counts), deadline
            )
            self._give(output, part.view(output.shape), redop)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        output, tensor = alias(output), alias(tensor)
        count = output.numel()
        sizes = (count,) * self.world_size
        call = describe_call("reduce_scatter", output, self._place(ctx), redop=redop, count=tensor.numel(), sizes=sizes)
        with self._collective(call, ctx) as deadline:
            whole = summand(dense(scaled(tensor, factor)))
            part = summand(dense(output))
            operation = operation_of(self._mpi, redop, output.dtype)
            sent, received = self._reducible(whole), self._reducible(part)
            counts = list(sizes)
            self._run(
                lambda comm: comm.Ireduce_scatter(sent, received, counts, operation), (whole, part, counts), deadline
            )
            self._give(output, part, redop)

    def _reducible(self, tensor: Tensor) -> list[Any]:
        return [self._engine.memory(tensor), tensor.numel(), datatype_of(self._mpi, tensor.dtype)]

    def _give(self, tensor: Tensor, work: Tensor, redop: int) -> None:
        """Write what MPI has reduced into `work`, which may be the memory of `tensor`, to `tensor`."""
        divide(work, redop, self.world_size)
        if work.data_ptr() != tensor.data_ptr():
            write_back(tensor, work if tensor.dtype != torch.bool else work.view(torch.bool))

    # -- moves ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int, ctx: CallContext) -> None:
        tensor = alias(tensor)
        data = dense(tensor)
        with self._collective(describe_call("broadcast", data, self._place(ctx), root=root), ctx) as deadline:
            self._run(lambda comm: comm.Ibcast(self._elements(data), root), data, deadline)
            if data is not tensor and root != self.rank:
                write_back(tensor, data)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, ctx: CallContext, *, root: int = -1) -> None:
        tensor, outputs = alias(tensor), [alias(t) for t in outputs]
        data = dense(tensor)
        counts = [t.numel() for t in outputs]
        all_sizes = tuple(counts) if root < 0 else ()
        count = sum(counts) if root < 0 else data.numel()
        name = "all_gather" if root < 0 else "gather"
        call = describe_call(name, data, self._place(ctx), root=root, count=count, sizes=all_sizes)
        with self._collective(call, ctx) as deadline:
            whole = torch.empty(sum(counts), dtype=tensor.dtype)
            sent, received = self._elements(data), self._pieces(whole, counts)
            memory = (data, whole)
            if root < 0:
                self._run(lambda comm: comm.Iallgatherv(sent, received), memory, deadline)
            else:
                into = received if root == self.rank else None
                self._run(lambda comm: comm.Igatherv(sent, into, root), memory, deadline)
            self._hand_out(outputs, whole, counts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        output, data = alias(output), dense(alias(tensor))
        whole = dense(output)
        with self._collective(describe_call("all_gather", data, self._place(ctx)), ctx) as deadline:
            sent = self._elements(data)
            received = [self._engine.memory(whole), data.numel(), element_of(self._mpi, data.dtype)]
            self._run(lambda comm: comm.Iallgather(sent, received), (data, whole), deadline)
            if whole is not output:
                write_back(output, whole)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, ctx: CallContext) -> None:
        output = alias(output)
        data = dense(output)
        with self._collective(describe_call("scatter", data, self._place(ctx), root=root), ctx) as deadline:
            whole = torch.cat([dense(alias(t)).view(-1) for t in inputs]) if inputs else data[:0]
            counts = [t.numel() for t in inputs]
            sent = self._pieces(whole, counts) if root == self.rank else None
            received = self._elements(data)
            self._run(lambda comm: comm.Iscatterv(sent, received, root), (whole, data), deadline)
            if data is not output:
                write_back(output, data)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], ctx: CallContext, *, splits: bool
    ) -> None:
        """Write rank r's inputs[rank] to outputs[r]; with `splits` sizes may differ."""
        outputs = [alias(t) for t in outputs]
        sent_counts, received_counts = [t.numel() for t in inputs], [t.numel() for t in outputs]
        # The sizes differ from rank to rank, and are compared in a round of their own.
        call = describe_call("all_to_all", inputs[0], self._place(ctx), count=-1)
        with self._collective(call, ctx) as deadline:
            self._compare(sent_counts, received_counts, inputs[0].element_size(), deadline)
            whole = torch.cat([dense(alias(t)).view(-1) for t in inputs])
            got = torch.empty(sum(received_counts), dtype=whole.dtype)
            sent, received = self._pieces(whole, sent_counts), self._pieces(got, received_counts)
            self._run(lambda comm: comm.Ialltoallv(sent, received), (whole, got), deadline)
            self._hand_out(outputs, got, received_counts)

    def all_to_all_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """Exchange the equal parts of two contiguous tensors as `all_to_all` does; they are not copied."""
        tensor, output = alias(tensor), alias(output)
        counts = [tensor.numel() // self.world_size] * self.world_size
        # The sizes differ from rank to rank, and are compared in a round of their own.
        call = describe_call("all_to_all", tensor, self._place(ctx), count=-1)
        with self._collective(call, ctx) as deadline:
            self._compare(counts, counts, tensor.element_size(), deadline)
            sent, received = self._pieces(tensor, counts), self._pieces(output, counts)
            self._run(lambda comm: comm.Ialltoallv(sent, received), (tensor, output), deadline)

    def _compare(self, sent: list[int], awaited: list[int], size: int, deadline: Deadline) -> None:
        """Let every rank learn what all send and await, so that all find the same pairs that do not fit."""
        mine = torch.tensor([sent, awaited])
        tables = torch.empty((self.world_size, 2, self.world_size), dtype=torch.int64)
        ours = self._elements(mine)
        theirs = [self._engine.memory(tables), mine.numel(), element_of(self._mpi, mine.dtype)]
        self._run(lambda comm: comm.Iallgather(ours, theirs), (mine, tables), deadline)
        if calls := compare_splits((tables * size).tolist()):
            raise Disagreement(calls)

    def _elements(self, tensor: Tensor) -> list[Any]:
        return [self._engine.memory(tensor), tensor.numel(), element_of(self._mpi, tensor.dtype)]

    def _pieces(self, tensor: Tensor, counts: Sequence[int]) -> list[Any]:
        """Return a contiguous tensor as pieces of so many elements, one after the other."""
        begins = [0, *accumulate(counts)][: len(counts)]
        return [self._engine.memory(tensor), list(counts), begins, element_of(self._mpi, tensor.dtype)]

    @staticmethod
    def _hand_out(outputs: Sequence[Tensor], whole: Tensor, counts: Sequence[int]) -> None:
        for output, piece in zip(outputs, torch.split(whole, list(counts)), strict=False):
            write_back(output, piece.view(output.shape))

    # -- point to point ------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, tag: int, ctx: CallContext) -> None:
        self.end_send(self.begin_send(dense(alias(tensor)), dst, tag), dst, Deadline.after(ctx.timeout_s))

    def recv(self, tensor: Tensor, src: int, tag: int, ctx: CallContext) -> int:
        tensor = alias(tensor)
        data = dense(tensor)
        source = self.end_recv(self.begin_recv(data, src, tag), data, src, Deadline.after(ctx.timeout_s))
        if data is not tensor:
            write_back(tensor, data)
        return source

    def begin_send(self, data: Tensor, dst: int, tag: int) -> Underway:
        self._check_tag(tag, self._engine.num_tags)
        return self._engine.send(dst, data, tag)

    def begin_recv(self, data: Tensor, src: int, tag: int) -> Underway:
        """Start to receive into a dense tensor, from anybody where `src` is below zero."""
        self._check_tag(tag, self._engine.num_tags)
        return self._engine.recv(src, data, tag) if src >= 0 else self._engine.recv_any(data, tag)

    def end_send(self, message: Underway, dst: int, deadline: Deadline) -> None:
        """Return when the bytes have left the tensor."""
        with self._reporting(Operation(f"send to rank {dst}", self.group, self.rank), deadline, dst):
            message.finish(deadline.left_s, message.watch().look)

    def end_recv(self, message: Underway, data: Tensor, src: int, deadline: Deadline) -> int:
        """Wait until `data` holds the message; return the rank that sent it.

        Raises:
            MismatchError: the message is not as long as the tensor.
        """
        label = f"recv from rank {src}" if src >= 0 else "recv from any rank"
        with self._reporting(Operation(label, self.group, self.rank), deadline, src):
            try:
                message.finish(deadline.left_s, message.watch().look)
            except self._mpi.Exception as error:
                if error.Get_error_class() != self._mpi.ERR_TRUNCATE:
                    raise
                self._refuse("more than ", nbytes(data), data, message._source_rank())
            source, got = message._source_rank(), message.status.Get_count(self._mpi.BYTE)
            if got != nbytes(data):
                self._refuse("", got, data, source)
            return source

    def _refuse(self, more: str, sent: int, data: Tensor, source: int) -> None:
        wanted = f"{nbytes(data)} bytes of {dtype_name(dtype_of(data.dtype).code)}"
        raise Disagreement(
            {
                source: RankCall(f"send of {more}{sent} bytes to rank {self.rank}"),
                self.rank: RankCall(f"recv of {wanted} from rank {source}"),
            },
            is_collective=False,
        )
