"""`HierarchicalCollectives` carries out each collective between hosts in the way that fits its size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx._base.core_numbers import SUM
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.call import Call, describe_call
from phalanx._comm.transport.hierarchical.direct import DirectCollectives
from phalanx._comm.transport.numerics import HALF, sum_type
from phalanx._comm.transport.tensors import alias, dense, is_plain, nbytes, scaled, write_back


class HierarchicalCollectives(DirectCollectives):
    """It has every collective of `Transport`, with the same arguments; see there for what each does.

    Raises:
        MismatchError: some rank called something else; no tensor was changed.
        PeerLostError, DeadlineError: a rank died or is late; the tensors hold undefined values.
    """

    def barrier(self, ctx: CallContext) -> None:
        """Return when every rank has come. Cost: H - 1 messages from each host's leader, and log2 H of more than 5."""
        self._small_barrier(Call("barrier", place=self._place(ctx)), ctx)

    def allocate_on_host(self, nbytes: int, ctx: CallContext) -> dict[int, Tensor]:
        """Allocate memory as `Transport` says: each host in its own memory, all at one place of their sequence."""
        found: dict[int, Tensor] = {}
        call = Call("barrier", count=nbytes, place=self._place(ctx))
        self._interruptible(call, ctx, lambda: found.update(self._allocate_on_host(nbytes, call, ctx)))
        return found

    def _allocate_on_host(self, nbytes: int, call: Call, ctx: CallContext) -> dict[int, Tensor]:
        with self._running(call, ctx) as deadline:
            self._agree_here(ctx, deadline)
            memory = self.symm_mem
            pieces = memory.pieces(memory.allocate(nbytes, deadline, ctx.call_site, self._checked))
        return {
            rank: torch.frombuffer(piece, dtype=torch.uint8)
            for rank, piece in zip(self.layout.local_ranks, pieces, strict=True)
        }

    # -- reductions ----------------------------------------------------------------------------------------------

    def sum_in_place(self, tensor: Tensor, code: int, timeout_s: float, place: tuple[str, int]) -> None:
        ctx = CallContext(timeout_s, self.call_site(place))
        ctx.awaited = True
        self.all_reduce(tensor, SUM, ctx)

    def all_reduce(self, tensor: Tensor, redop: int, ctx: CallContext, *, root: int = -1, factor: Any = None) -> None:
        """Reduce `tensor` over ranks in place, on all or only on `root`; multiply each input by `factor` first.

        Cost: of S bytes on H hosts, S(H-1) leave a host at once if that is little; else 2S(H-1)/H, in segments.
        Numerics: half types add up in float32 and are rounded once; AVG divides the sum once. The same bits everywhere.
        """
        tensor = alias(tensor)
        call = describe_call("all_reduce" if root < 0 else "reduce", tensor, self._place(ctx), redop=redop, root=root)
        if self._is_small_sum(tensor.dtype, tensor.numel()):
            self._small_all_reduce(tensor, call, redop, ctx, root=root, factor=factor)
        else:
            self._interruptible(
                call, ctx, partial(self._large_all_reduce, tensor, call, redop, ctx, root=root, factor=factor)
            )

    def _large_all_reduce(
        self, tensor: Tensor, call: Call, redop: int, ctx: CallContext, *, root: int, factor: Any
    ) -> None:
        wanted = root in (-1, self.rank)
        with self._running(call, ctx) as deadline:
            self._give_to_leader(ctx, deadline)
            self._send_heads(deadline)
            source = sum_type(dense(scaled(tensor, factor))).view(-1)
            in_place = wanted and is_plain(tensor)
            result = tensor.view(-1) if in_place else torch.empty(source.shape, dtype=tensor.dtype)
            self._reduce_in_segments(
                source,
                result,
                redop,
                ctx,
                deadline,
                root=root,
                key=tensor.data_ptr(),
                is_scratch=source.data_ptr() != tensor.data_ptr(),
            )
            if wanted and not in_place:
                write_back(tensor, result.view(tensor.shape))

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """Write the reduction over ranks of inputs[rank] to `output`; the inputs may differ in size.

        Cost: of S bytes in all, S(H-1)/H leave each of H hosts.
        """
        output, inputs = alias(output), [alias(t) for t in inputs]
        counts = tuple(t.numel() for t in inputs)
        call = describe_call("reduce_scatter", output, self._place(ctx), redop=redop, count=sum(counts), sizes=counts)
        if self._is_small_sum(output.dtype, sum(counts)):
            scaled_inputs = [scaled(t, factor) for t in inputs]
            self._small_reduce_scatter(output, scaled_inputs, call, redop, ctx)
        else:
            self._interruptible(
                call, ctx, partial(self._large_reduce_scatter, output, inputs, call, redop, ctx, factor)
            )

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """Split `tensor` in equal parts, and write the reduction over ranks of this rank's part to `output`."""
        flat = dense(alias(tensor)).view(-1)
        self.reduce_scatter(output, torch.split(flat, [output.numel()] * self.world_size), redop, ctx, factor=factor)

    def _large_reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], call: Call, redop: int, ctx: CallContext, factor: Any
    ) -> None:
        with self._running(call, ctx) as deadline:
            self._agree_here(ctx, deadline)
            sources = [sum_type(dense(scaled(t, factor))).view(-1) for t in inputs]
            in_place = is_plain(output) and output.dtype not in HALF
            result = output.view(-1) if in_place else torch.empty(output.numel(), dtype=sources[0].dtype)
            self._reduce_scatter_in_segments(result, sources, redop, ctx, deadline)
            if not in_place:
                write_back(output, result.view(output.shape))

    # -- moves ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int, ctx: CallContext) -> None:
        """Overwrite `tensor` on every rank with root's. Cost: S bytes to each host that it is passed on to."""
        tensor = alias(tensor)
        call = describe_call("broadcast", tensor, self._place(ctx), root=root)
        if self._is_small(nbytes(tensor)):
            self._small_broadcast(tensor, call, root, ctx)
        else:
            self._interruptible(call, ctx, partial(self._large_broadcast, tensor, call, root, ctx))

    def _large_broadcast(self, tensor: Tensor, call: Call, root: int, ctx: CallContext) -> None:
        with self._running(call, ctx) as deadline:
            self._agree_here(ctx, deadline)
            data = dense(tensor)
            self._broadcast_in_segments(data.view(-1).view(torch.uint8), root, ctx, deadline)
            if data is not tensor and root != self.rank:
                write_back(tensor, data)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, ctx: CallContext, *, root: int = -1) -> None:
        """Write rank r's `tensor` to outputs[r], on every rank or only on `root`; elsewhere `outputs` is empty.

        Cost: of S bytes in all, S(H-1)/H leave each of H hosts; what belongs to `root` crosses once.
        """
        tensor, outputs = alias(tensor), [alias(t) for t in outputs]
        if root >= 0:
            self._interruptible(Call("gather"), ctx, partial(self._gather_to, outputs, tensor, root, ctx))
            return
        sizes = tuple(nbytes(t) for t in outputs)
        call = describe_call("all_gather", tensor, self._place(ctx), count=sum(sizes), sizes=sizes)
        if self._is_small(sum(sizes)):
            self._small_all_gather(outputs, tensor, call, sizes, ctx)
        else:
            self._interruptible(call, ctx, partial(self._large_all_gather, outputs, tensor, call, ctx))

    def all_gather_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """Write rank r's `tensor` to part r of `output`, which is split in world_size equal parts."""
        output, tensor = alias(output), alias(tensor)
        call = describe_call("all_gather", tensor, self._place(ctx))
        sizes = (nbytes(tensor),) * self.world_size
        if self._is_small(sum(sizes)):
            self._small_all_gather([output], tensor, call, sizes, ctx)
            return
        whole = output if is_plain(output) else torch.empty(output.shape, dtype=output.dtype)
        parts = list(torch.split(whole.view(-1), tensor.numel()))
        self._interruptible(call, ctx, partial(self._large_all_gather, parts, tensor, call, ctx))
        if whole is not output:
            write_back(output, whole)

    def _large_all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, call: Call, ctx: CallContext) -> None:
        with self._running(call, ctx) as deadline:
            self._agree_here(ctx, deadline)
            into = [t if is_plain(t) else torch.empty(t.shape, dtype=t.dtype) for t in outputs]
            flat = [t.view(-1).view(torch.uint8) for t in into]
            self._all_gather_in_segments(dense(tensor).view(-1).view(torch.uint8), flat, ctx, deadline)
            for output, got in zip(outputs, into, strict=True):
                if got is not output:
                    write_back(output, got)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, ctx: CallContext) -> None:
        """Write root's inputs[rank] to `output`; on the other ranks `inputs` is empty."""
        self._interruptible(Call("scatter"), ctx, partial(self._scatter, output, inputs, root, ctx))

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], ctx: CallContext, *, splits: bool
    ) -> None:
        """Write rank r's inputs[rank] to outputs[r]; with `splits` sizes may differ, and are compared across ranks."""
        self._interruptible(Call("all_to_all"), ctx, partial(self._all_to_all, outputs, inputs, ctx, splits=splits))

    def all_to_all_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """Exchange the equal parts of two contiguous tensors as `all_to_all` does."""
        parts = [list(alias(t).view(-1).chunk(self.world_size)) for t in (output, tensor)]
        if tensor.numel() == 0:
            parts = [[alias(t)] * self.world_size for t in (output, tensor)]
        self.all_to_all(parts[0], parts[1], ctx, splits=False)
