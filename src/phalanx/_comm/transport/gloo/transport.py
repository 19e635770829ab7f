"""`GlooTransport` runs a group over Gloo, with the collectives of torch's own process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx._base.deadline import Deadline
from phalanx._base.dtypes import dtype_name, dtype_of
from phalanx._comm.diagnostics.failure_report import FailedOperation, RankCall
from phalanx._comm.engines.engine import timedelta_of
from phalanx._comm.transport.base import CallContext, Transport
from phalanx._comm.transport.call import CollectiveCall, Disagreement, compare_splits, describe_call
from phalanx._comm.transport.gloo.numerics import is_reducible, operation_of, result_of, summand
from phalanx._comm.transport.gloo.session import GlooSession, bytes_of, gloo_errors
from phalanx._comm.transport.tensors import alias, dense, nbytes, scaled, write_back


class GlooTransport(Transport):
    """A `GlooTransport` runs groups whose ranks cannot share memory, or lack the C core.

    Numerics: Gloo sums in its own order, which is fixed for a job but may depend on the number of ranks. Half types are
    summed in float32 and rounded once; AVG divides the sum once.
    Cost: one all_gather of 256 bytes per rank, in which the ranks agree, then Gloo's collective. Reduced tensors are
    copied. A reduce_scatter costs an all_reduce of all inputs. An all_gather of uneven sizes costs as much as one in
    which every rank has the largest size. An all_to_all adds an all_gather of the sizes.
    """

    is_interruptible = False

    def __init__(self, session: GlooSession) -> None:
        self.group = session.group
        self.rank = session.rank
        self.world_size = session.world_size
        self.lock = session.lock
        self._session = session

    # -- state and end -------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._session.closed

    @property
    def seq(self) -> int:
        return self._session.seq

    def call_site(self, place: tuple[str, int]) -> int:
        return self._session.call_site(place)

    def set_exit_reason(self, exit_reason: str) -> None:
        self._session.set_exit_reason(exit_reason)

    def leave_in_flight(self) -> None:
        self._session.leave_in_flight()

    def close(self) -> None:
        self._session.close()

    def interrupted(self, error: BaseException, *, what: str = "", peer: int = -1) -> None:
        self._session.reports.interrupted(error, what=what, peer=peer)

    # -- reductions ----------------------------------------------------------------------------------------------

    def barrier(self, ctx: CallContext) -> None:
        """Wait until every rank has called this: the agreement is already a barrier."""
        with self._session.collective(CollectiveCall("barrier", place=self._session.place(ctx)), ctx):
            pass

    def all_reduce(self, tensor: Tensor, redop: int, ctx: CallContext, *, root: int = -1, factor: Any = None) -> None:
        tensor = alias(tensor)
        call = describe_call(
            "all_reduce" if root < 0 else "reduce", tensor, self._session.place(ctx), redop=redop, root=root
        )
        with self._session.collective(call, ctx) as deadline:
            result = self._reduced(dense(scaled(tensor, factor)), redop, deadline, root)
            if root in (-1, self.rank):
                write_back(tensor, result)

    def _reduced(self, data: Tensor, redop: int, deadline: Deadline, root: int = -1) -> Tensor:
        """Return the reduction of all ranks' `data`, everywhere or on `root`."""
        if not is_reducible(redop, data.dtype):  # a product of complex numbers
            parts = self._all_gather(bytes_of(data), [nbytes(data)] * self.world_size, deadline)
            return torch.stack([part.view(data.dtype) for part in parts]).prod(0).view(data.shape)
        work = summand(data, redop)
        op = operation_of(redop, data.dtype)
        if self.world_size > 1 and work.numel():
            if root < 0:
                self._session.run("allreduce", [[work]], deadline, op=op)
            else:
                self._session.run("reduce", [[work]], deadline, op=op, root=root)
        return result_of(work, data, redop, self.world_size)

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        output = alias(output)
        counts = [t.numel() for t in inputs]
        call = describe_call(
            "reduce_scatter", output, self._session.place(ctx), redop=redop, count=sum(counts), sizes=tuple(counts)
        )
        with self._session.collective(call, ctx) as deadline:
            whole = torch.cat([dense(scaled(alias(t), factor)).view(-1) for t in inputs])
            parts = torch.split(self._reduced(whole, redop, deadline), counts)
            write_back(output, parts[self.rank].view(output.shape))

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        output = alias(output)
        count = output.numel()
        sizes = (count,) * self.world_size
        call = describe_call(
            "reduce_scatter", output, self._session.place(ctx), redop=redop, count=tensor.numel(), sizes=sizes
        )
        with self._session.collective(call, ctx) as deadline:
            whole = self._reduced(dense(scaled(alias(tensor), factor)).view(-1), redop, deadline)
            write_back(output, whole[self.rank * count : (self.rank + 1) * count].view(output.shape))

    # -- moving data ---------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int, ctx: CallContext) -> None:
        tensor = alias(tensor)
        data = dense(tensor)
        with self._session.collective(
            describe_call("broadcast", data, self._session.place(ctx), root=root), ctx
        ) as deadline:
            if self.world_size > 1 and nbytes(data):
                self._session.run("broadcast", [[bytes_of(data)]], deadline, root=root)
            if root != self.rank:
                write_back(tensor, data)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, ctx: CallContext, *, root: int = -1) -> None:
        tensor, outputs = alias(tensor), [alias(t) for t in outputs]
        data = dense(tensor)
        if root >= 0:
            self._gather_to(outputs, data, root, ctx)
            return
        counts = tuple(t.numel() for t in outputs)
        call = describe_call("all_gather", data, self._session.place(ctx), count=sum(counts), sizes=counts)
        with self._session.collective(call, ctx) as deadline:
            parts = self._all_gather(bytes_of(data), [nbytes(t) for t in outputs], deadline)
            self._hand_out(outputs, parts)

    def _gather_to(self, outputs: Sequence[Tensor], data: Tensor, root: int, ctx: CallContext) -> None:
        with self._session.collective(
            describe_call("gather", data, self._session.place(ctx), root=root), ctx
        ) as deadline:
            mine = bytes_of(data)
            parts = [torch.empty_like(mine) for _ in outputs]
            if self.world_size == 1:
                parts = [mine]
            elif len(mine):
                self._session.run("gather", [[parts] if root == self.rank else [], [mine]], deadline, root=root)
            self._hand_out(outputs, parts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        output, data = alias(output), dense(alias(tensor))
        with self._session.collective(describe_call("all_gather", data, self._session.place(ctx)), ctx) as deadline:
            parts = self._all_gather(bytes_of(data), [nbytes(data)] * self.world_size, deadline)
            write_back(output, torch.cat(parts).view(output.dtype).view(output.shape))

    def _all_gather(self, mine: Tensor, sizes: Sequence[int], deadline: Deadline) -> list[Tensor]:
        """Return every rank's bytes, by rank. Gloo gathers pieces of one size, so smaller pieces are sent padded."""
        if self.world_size == 1:
            return [mine.clone()]
        most = max(sizes)
        if most == 0:
            return [mine] * self.world_size
        padded = mine if len(mine) == most else torch.cat([mine, mine.new_zeros(most - len(mine))])
        whole = torch.empty(self.world_size * most, dtype=torch.uint8, device="cpu")
        self._session.run("_allgather_base", [whole, padded], deadline)
        return [whole[r * most : r * most + size] for r, size in enumerate(sizes)]

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, ctx: CallContext) -> None:
        output = alias(output)
        data = dense(output)
        with self._session.collective(
            describe_call("scatter", data, self._session.place(ctx), root=root), ctx
        ) as deadline:
            pieces = [bytes_of(dense(alias(t))) for t in inputs]
            if self.world_size == 1:
                bytes_of(data).copy_(pieces[0])
            elif nbytes(data):
                self._session.run("scatter", [[bytes_of(data)], [pieces] if pieces else []], deadline, root=root)
            write_back(output, data)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], ctx: CallContext, *, splits: bool
    ) -> None:
        outputs = [alias(t) for t in outputs]
        sent, awaited = [nbytes(t) for t in inputs], [nbytes(t) for t in outputs]
        # The sizes differ from rank to rank, and are compared in a round of their own.
        call = describe_call("all_to_all", inputs[0], self._session.place(ctx), count=-1)
        with self._session.collective(call, ctx) as deadline:
            self._compare(sent, awaited, deadline)
            whole = torch.cat([bytes_of(dense(alias(t))) for t in inputs])
            got = torch.empty(sum(awaited), dtype=torch.uint8, device="cpu")
            self._exchange(got, whole, awaited, sent, deadline)
            self._hand_out(outputs, torch.split(got, awaited))

    def all_to_all_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """Exchange the equal parts of two contiguous tensors as `all_to_all` does; they are not copied."""
        tensor, output = alias(tensor), alias(output)
        sizes = [nbytes(tensor) // self.world_size] * self.world_size
        # The sizes are compared in a round of their own, as in `all_to_all`, which another rank may have called.
        call = describe_call("all_to_all", tensor, self._session.place(ctx), count=-1)
        with self._session.collective(call, ctx) as deadline:
            self._compare(sizes, sizes, deadline)
            self._exchange(bytes_of(output), bytes_of(tensor), sizes, sizes, deadline)

    def _exchange(
        self, got: Tensor, sent: Tensor, awaited: Sequence[int], sizes: Sequence[int], deadline: Deadline
    ) -> None:
        if self.world_size == 1:
            got.copy_(sent)
        else:
            self._session.run("alltoall_base", [got, sent, list(awaited), list(sizes)], deadline)

    def _compare(self, sent: list[int], awaited: list[int], deadline: Deadline) -> None:
        """Exchange the sizes that all ranks send and expect, so that all ranks find the same mismatches."""
        mine = bytes_of(torch.tensor([sent, awaited], device="cpu"))
        tables = torch.stack(self._all_gather(mine, [len(mine)] * self.world_size, deadline)).view(torch.int64)
        if calls := compare_splits(tables.view(self.world_size, 2, self.world_size).tolist()):
            raise Disagreement(calls)

    @staticmethod
    def _hand_out(outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        for output, part in zip(outputs, parts, strict=False):
            write_back(output, part.view(output.dtype).view(output.shape))

    # -- point to point: a header (bytes, dtype) before each message, because Gloo does not compare sizes -------------

    def send(self, tensor: Tensor, dst: int, tag: int, ctx: CallContext) -> None:
        self._session.check_tag(tag, self._session.engine.num_tags)
        data = dense(alias(tensor))
        header = torch.tensor([nbytes(data), dtype_of(data.dtype).code], device="cpu")
        deadline = Deadline.after(ctx.timeout_s)
        with (
            self._session.reporting(FailedOperation(f"send to rank {dst}", self.group, self.rank), deadline, dst),
            gloo_errors(),
        ):
            under_way = [self._session.engine.send(dst, part, tag) for part in (header, bytes_of(data)) if len(part)]
            self._session.wait_for(under_way, dst, nbytes(data), deadline)

    def recv(self, tensor: Tensor, src: int, tag: int, ctx: CallContext) -> int:
        self._session.check_tag(tag, self._session.engine.num_tags)
        tensor = alias(tensor)
        data = dense(tensor)
        header = torch.empty(2, dtype=torch.int64, device="cpu")
        deadline = Deadline.after(ctx.timeout_s)
        label = f"recv from rank {src}" if src >= 0 else "recv from any rank"
        with self._session.reporting(FailedOperation(label, self.group, self.rank), deadline, src), torch.no_grad():
            with gloo_errors():
                source = self._recv_header(header, src, tag, deadline)
            code = dtype_of(data.dtype).code
            if header.tolist() != [nbytes(data), code]:
                self._refuse(source, header.tolist(), data)
            if nbytes(data):
                with gloo_errors():
                    message = self._session.engine.recv(source, bytes_of(data), tag)
                self._session.wait_for([message], source, nbytes(data), deadline)
            write_back(tensor, data)
        return source

    def _recv_header(self, header: Tensor, src: int, tag: int, deadline: Deadline) -> int:
        if src >= 0:
            self._session.engine.recv(src, header, tag).wait(timedelta_of(deadline))
            return src
        pending = self._session.engine.recv_any(header, tag)
        pending.wait(timedelta_of(deadline))
        return int(pending._source_rank())

    def _refuse(self, source: int, sent: Sequence[int], data: Tensor) -> None:
        wanted = f"{nbytes(data)} bytes of {dtype_name(dtype_of(data.dtype).code)}"
        raise Disagreement(
            {
                source: RankCall(f"send of {sent[0]} bytes of {dtype_name(sent[1])} to rank {self.rank}"),
                self.rank: RankCall(f"recv of {wanted} from rank {source}"),
            },
            is_collective=False,
        )
