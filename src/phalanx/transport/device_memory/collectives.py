"""Carry out collectives on a device: copy in, meet in the host's memory with the fingerprint, read from the others.

    each rank   its part ──▶ its area          on the device; the host waits for it
    all         meet                           in the host's memory: same order, same errors as the CPU's collectives
    each rank   all areas ──▶ its result       on the device; nobody waits for it

Cost: one meeting for each 32 MiB of a rank's part, divided by the number of ranks where it has one for each. All ranks
read what they need themselves: P parts of S bytes for an all_reduce.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.core_numbers import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    GATHER,
    ON_DEVICE,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SUM,
)
from phalanx.transport.base import CallContext, Collectives
from phalanx.transport.device_memory.areas import Areas
from phalanx.transport.device_memory.reductions import combine
from phalanx.transport.shared_memory import SharedMemoryTransport
from phalanx.transport.staging.streams import CopyStream
from phalanx.transport.tensors import dense, flat, is_plain, nbytes, scaled, uncounted


@dataclass(frozen=True)
class _Operation:
    """An operation holds what the ranks must agree on."""

    kind: int
    tensor: Tensor
    count: int
    redop: int = SUM
    root: int = -1
    sizes: tuple[int, ...] | None = None


class DeviceCollectives(Collectives):
    """It has the collectives of ranks that map each other's areas on a device. Tensors may have any strides.

    What is queued lies on the current stream, which must be `stream`: call it inside of `stream.queueing()`.
    """

    def __init__(self, host: SharedMemoryTransport, areas: Areas, stream: CopyStream) -> None:
        self._host = host
        self._areas = areas
        self._stream = stream

    def all_reduce(self, tensor: Tensor, redop: int, ctx: CallContext, *, root: int = -1, factor: Any = None) -> None:
        """Reduce `tensor` over ranks in place, on all or only on `root`; multiply each input by `factor` first."""
        operation = _Operation(REDUCE if root >= 0 else ALL_REDUCE, tensor, tensor.numel(), redop, root)
        target = tensor if root in (-1, self._host.rank) else None
        with self._alone(ctx), _written(target) as out:
            source = flat(dense(scaled(tensor, factor)))
            for start, stop in self._areas.pieces(source.numel(), source.element_size(), 1):
                self._exchange(operation, [source[start:stop]], ctx)
                if out is not None:
                    combine(out[start:stop], self._of_all(0, 1, stop - start, source.dtype), redop)

    def broadcast(self, tensor: Tensor, root: int, ctx: CallContext) -> None:
        """Overwrite `tensor` on every rank with root's."""
        is_root = root == self._host.rank
        operation = _Operation(BROADCAST, tensor, nbytes(tensor), root=root)
        with self._alone(ctx), _written(None if is_root else tensor) as out:
            source = flat(dense(tensor)) if out is None else out
            for start, stop in self._areas.pieces(source.numel(), source.element_size(), 1):
                self._exchange(operation, [source[start:stop]] if is_root else [], ctx)
                if out is not None:
                    out[start:stop].copy_(self._areas.read(root, 0, 1, stop - start, out.dtype))

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, ctx: CallContext, *, root: int = -1) -> None:
        """Write rank r's `tensor` to outputs[r], on every rank or only on `root`; elsewhere `outputs` is empty."""
        counts = [output.numel() for output in outputs] or [tensor.numel()] * self._host.world_size
        sizes = tuple(count * tensor.element_size() for count in counts)
        operation = _Operation(GATHER if root >= 0 else ALL_GATHER, tensor, sizes[0], root=root, sizes=sizes)
        with self._alone(ctx), contextlib.ExitStack() as stack:
            outs = [stack.enter_context(_written(output)) for output in outputs]
            source = flat(dense(tensor))
            for start, stop in self._areas.pieces(max(counts), source.element_size(), 1):
                self._exchange(operation, [source[start:stop]], ctx)
                for rank, out in enumerate(outs):
                    count = min(stop, counts[rank]) - start
                    if out is not None and count > 0:
                        out[start : start + count].copy_(self._areas.read(rank, 0, 1, count, source.dtype))

    def all_gather_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """Write rank r's `tensor` to part r of `output`, which is split in world_size equal parts."""
        with torch.no_grad(), _written(output) as out:
            assert out is not None
            self.gather(out.view(self._host.world_size, tensor.numel()).unbind(), tensor, ctx)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, ctx: CallContext) -> None:
        """Write root's inputs[rank] to `output`; on the other ranks `inputs` is empty."""
        world = self._host.world_size
        operation = _Operation(SCATTER, output, nbytes(output), root=root)
        with self._alone(ctx), _written(output) as out:
            assert out is not None
            sources = [flat(dense(one)) for one in inputs]
            for start, stop in self._areas.pieces(out.numel(), out.element_size(), world):
                self._exchange(operation, [source[start:stop] for source in sources], ctx)
                out[start:stop].copy_(self._areas.read(root, self._host.rank, world, stop - start, out.dtype))

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """Write the reduction over ranks of inputs[rank] to `output`; the inputs may differ in size."""
        world, rank = self._host.world_size, self._host.rank
        counts = tuple(one.numel() for one in inputs)
        operation = _Operation(REDUCE_SCATTER, output, counts[0], redop, sizes=counts)
        with self._alone(ctx), _written(output) as out:
            assert out is not None
            sources = [flat(dense(scaled(one, factor))) for one in inputs]
            for start, stop in self._areas.pieces(max(counts), out.element_size(), world):
                self._exchange(operation, [source[start:stop] for source in sources], ctx)
                count = min(stop, counts[rank]) - start
                if count > 0:
                    combine(out[start : start + count], self._of_all(rank, world, count, out.dtype), redop)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """Split `tensor` in equal parts, and write the reduction over ranks of this rank's part to `output`."""
        with torch.no_grad():
            parts = flat(dense(tensor)).view(self._host.world_size, output.numel()).unbind()
        self.reduce_scatter(output, parts, redop, ctx, factor=factor)

    def close(self) -> None:
        """Unmap the areas. What was queued on the device must be over."""
        self._areas.close()

    @contextlib.contextmanager
    def _alone(self, ctx: CallContext) -> Iterator[None]:
        """Let no other collective of the group begin before the exchanges of this one are over."""
        with self._host.exclusive(ctx.timeout_s), torch.no_grad():
            yield

    def _of_all(self, slot: int, slots: int, count: int, dtype: torch.dtype) -> list[Tensor]:
        return [self._areas.read(rank, slot, slots, count, dtype) for rank in range(self._host.world_size)]

    def _exchange(self, operation: _Operation, pieces: Sequence[Tensor], ctx: CallContext) -> None:
        """Let the others read `pieces`, one for each slot, and return when their pieces can be read.

        Raises:
            MismatchError, PeerLostError, DeadlineError: as the CPU's collectives.
        """
        self._areas.write(pieces)
        self._stream.await_on_host(self._stream.mark())
        self._host.meet(
            operation.kind,
            operation.sizes,
            self._areas.turn + 1,  # a call of the CPU's, which exchanges bytes elsewhere, has no number
            operation.count,
            operation.tensor,
            operation.redop,
            operation.root,
            ctx,
            ON_DEVICE,
        )
        self._areas.met()


@contextlib.contextmanager
def _written(tensor: Tensor | None) -> Iterator[Tensor | None]:
    """Yield memory in one dimension that becomes the elements of `tensor`, in order; nothing for None."""
    if tensor is None:
        yield None
        return
    with uncounted(tensor) as alias:
        if is_plain(tensor):
            yield flat(alias)
            return
        out = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        yield out
        alias.copy_(out.view(tensor.shape))
