"""`SharedMemoryCollectives` passes the tensors of each collective on one host to the C core."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx._base.core_numbers import SUM
from phalanx._base.deadline import Deadline, timeout_ns
from phalanx._base.dtypes import dtype_of
from phalanx._comm.symmetric_memory.memory import Buffer
from phalanx._comm.symmetric_memory.sizes import STAGE_BYTES
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.shared_memory.session import SharedMemorySession
from phalanx._comm.transport.tensors import dense, is_plain, nbytes, scaled, write_back


class SharedMemoryCollectives(SharedMemorySession):
    """It has every collective; tensors in the symmetric heap are read and written in place by all ranks."""

    def barrier(self, ctx: CallContext) -> None:
        """Return when every rank has come."""
        self._collective(ctx, lambda: self.core.barrier(ctx.timeout_ns, ctx.call_site, ()))

    def sum_in_place(self, tensor: Tensor, code: int, timeout_s: float, place: tuple[str, int]) -> None:
        """Do what `all_reduce` does with SUM, for a contiguous tensor of a real dtype: the shortest way to the core."""
        if self.symm_mem.one_memory:
            self._refuse_one_memory(tensor)
        call_site = self._sites.get(place)
        at = tensor.data_ptr()
        if self.lock.locked():
            self._await_lock(timeout_s)
        with self.lock:  # this is `exclusive`, spelt out
            try:
                status = self.core.all_reduce(
                    at,
                    at,
                    tensor.numel(),
                    code,
                    SUM,
                    -1,
                    timeout_ns(timeout_s),
                    self.call_site(place) if call_site is None else call_site,
                    tensor.shape,
                )
            except BaseException as error:
                self._interrupted(error)
                raise
        if status:
            self.check(status, CallContext(timeout_s, 0))

    def all_reduce(self, tensor: Tensor, redop: int, ctx: CallContext, *, root: int = -1, factor: Any = None) -> None:
        """Reduce `tensor` over ranks in place, on all or only on `root`; multiply each input by `factor` first.

        Raises:
            ValueError: the tensor is one memory for all ranks.
        """
        if self.symm_mem.one_memory:
            self._refuse_one_memory(tensor)
        src = dense(scaled(tensor, factor))
        dst = src if factor is None or not is_plain(tensor) else tensor
        self._collective(
            ctx,
            lambda: self.core.all_reduce(
                src.data_ptr(),
                dst.data_ptr(),
                src.numel(),
                dtype_of(src.dtype).code,
                redop,
                root,
                ctx.timeout_ns,
                ctx.call_site,
                tensor.shape,
            ),
        )
        if dst is not tensor and root in (-1, self.symm_mem.rank):
            write_back(tensor, dst)

    def _refuse_one_memory(self, tensor: Tensor) -> None:
        at = tensor.data_ptr()
        if tensor.numel() and any(at in addresses for addresses in list(self.symm_mem.one_memory.values())):
            raise ValueError(
                f"all_reduce in group {self.group!r} on rank {self.symm_mem.rank}: the tensor of shape "
                f"{tuple(tensor.shape)} lies in one memory for all ranks (a parameter of ZeroRedundancyOptimizer, or "
                "shared_empty(owner=...)): each would read what others have already written.\nIt holds the same on "
                "every rank; to reduce another value of each rank, reduce a clone."
            )

    def broadcast(self, tensor: Tensor, root: int, ctx: CallContext) -> None:
        data = dense(tensor)
        self._collective(
            ctx,
            lambda: self.core.broadcast(
                data.data_ptr(),
                nbytes(data),
                dtype_of(data.dtype).code,
                root,
                ctx.timeout_ns,
                ctx.call_site,
                tensor.shape,
            ),
        )
        if data is not tensor and root != self.symm_mem.rank:
            write_back(tensor, data)

    def broadcast_buffers(self, tensor: Tensor, root: int, ctx: CallContext, *, number: int) -> None:
        """Do what `broadcast` does, but the root waits for nobody, and the others for the root alone; see csrc/early.h.

        Whether all ranks called it, with the same `number`, is asked when the next collective begins.
        """
        data = dense(tensor)
        # Held here until the call is over: the heap may go with the last block of it.
        areas = self._two_areas(nbytes(data), ctx) if nbytes(data) > STAGE_BYTES and self.world_size > 1 else []

        def call() -> int:
            areas.reverse()  # in turn with the phases: not before this call has the lock, nor if it is refused
            status = self.core.broadcast_buffers(
                data.data_ptr(),
                nbytes(data),
                ctypes.addressof(areas[0]) if areas else 0,
                dtype_of(data.dtype).code,
                root,
                number,
                ctx.timeout_ns,
                ctx.call_site,
                tensor.shape,
            )
            if status:
                areas.reverse()
            return status

        self._collective(ctx, call)
        if data is not tensor and root != self.symm_mem.rank:
            write_back(tensor, data)

    def _two_areas(self, size: int, ctx: CallContext) -> list[Buffer]:
        """Return two places of `size` bytes in this rank's heap, for use in turn. All ranks call it if they are new."""
        areas = self._areas.get(size)
        if areas is None:
            with self.exclusive(ctx.timeout_s):
                deadline = Deadline.after(ctx.timeout_s)
                areas = [
                    self.symm_mem.allocate(size, deadline, ctx.call_site, lambda status: self.check(status, ctx))
                    for _ in range(2)
                ]
            self._areas[size] = areas
        return areas

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, ctx: CallContext, *, root: int = -1) -> None:
        """Write rank r's `tensor` to outputs[r], on every rank or only on `root`; elsewhere `outputs` is empty."""
        src, dst = dense(tensor), [dense(t) for t in outputs]
        sizes = tuple(nbytes(t) for t in dst) if dst else (nbytes(src),) * self.symm_mem.world_size
        self._collective(
            ctx,
            lambda: self.core.gather(
                src.data_ptr(),
                tuple(t.data_ptr() for t in dst) if dst else None,
                sizes,
                dtype_of(src.dtype).code,
                root,
                ctx.timeout_ns,
                ctx.call_site,
                tensor.shape,
            ),
        )
        for output, got in zip(outputs, dst, strict=True):
            if got is not output:
                write_back(output, got)

    def all_gather_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """Write rank r's `tensor` to part r of `output`, which is split in world_size equal parts."""
        src, dst = dense(tensor), dense(output)
        size, at = nbytes(src), dst.data_ptr()
        world = self.symm_mem.world_size
        self._collective(
            ctx,
            lambda: self.core.gather(
                src.data_ptr(),
                tuple(at + r * size for r in range(world)),
                (size,) * world,
                dtype_of(src.dtype).code,
                -1,
                ctx.timeout_ns,
                ctx.call_site,
                tensor.shape,
            ),
        )
        if dst is not output:
            write_back(output, dst)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, ctx: CallContext) -> None:
        """Write root's inputs[rank] to `output`; on the other ranks `inputs` is empty."""
        src, dst = [dense(t) for t in inputs], dense(output)
        self._collective(
            ctx,
            lambda: self.core.scatter(
                tuple(t.data_ptr() for t in src) if src else None,
                dst.data_ptr(),
                nbytes(dst),
                dtype_of(dst.dtype).code,
                root,
                ctx.timeout_ns,
                ctx.call_site,
                output.shape,
            ),
        )
        if dst is not output:
            write_back(output, dst)

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """Write the reduction over ranks of inputs[rank] to `output`; the inputs may differ in size."""
        src, dst = [dense(scaled(t, factor)) for t in inputs], dense(output)
        self._reduce_scatter(
            tuple(t.data_ptr() for t in src), tuple(t.numel() for t in src), dst, redop, ctx, output.shape
        )
        if dst is not output:
            write_back(output, dst)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """Split `tensor` in equal parts, and write the reduction over ranks of this rank's part to `output`."""
        src, dst = dense(scaled(tensor, factor)), dense(output)
        at, size, world = src.data_ptr(), nbytes(dst), self.symm_mem.world_size
        addresses = tuple(at + r * size for r in range(world))
        self._reduce_scatter(addresses, (dst.numel(),) * world, dst, redop, ctx, output.shape)
        if dst is not output:
            write_back(output, dst)

    def _reduce_scatter(
        self,
        addresses: tuple[int, ...],
        counts: tuple[int, ...],
        dst: Tensor,
        redop: int,
        ctx: CallContext,
        shape: torch.Size,
    ) -> None:
        self._collective(
            ctx,
            lambda: self.core.reduce_scatter(
                addresses,
                counts,
                dst.data_ptr(),
                dtype_of(dst.dtype).code,
                redop,
                ctx.timeout_ns,
                ctx.call_site,
                shape,
            ),
        )

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], ctx: CallContext, *, splits: bool
    ) -> None:
        """Write rank r's inputs[rank] to outputs[r]; with `splits` sizes may differ, and are compared across ranks."""
        src, dst = [dense(t) for t in inputs], [dense(t) for t in outputs]
        self._collective(
            ctx,
            lambda: self.core.all_to_all(
                tuple(t.data_ptr() for t in src),
                tuple(nbytes(t) for t in src),
                tuple(t.data_ptr() for t in dst),
                tuple(nbytes(t) for t in dst),
                dtype_of(src[0].dtype).code,
                int(splits),
                ctx.timeout_ns,
                ctx.call_site,
                src[0].shape,
            ),
        )
        for output, got in zip(outputs, dst, strict=True):
            if got is not output:
                write_back(output, got)

    def all_to_all_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """Exchange the equal parts of two contiguous tensors as `all_to_all` does, without cutting them into views."""
        world = self.symm_mem.world_size
        size = nbytes(tensor) // world
        sizes = (size,) * world
        src, dst = tensor.data_ptr(), output.data_ptr()
        self._collective(
            ctx,
            lambda: self.core.all_to_all(
                tuple(range(src, src + size * world, size)) if size else (src,) * world,
                sizes,
                tuple(range(dst, dst + size * world, size)) if size else (dst,) * world,
                sizes,
                dtype_of(tensor.dtype).code,
                0,
                ctx.timeout_ns,
                ctx.call_site,
                tensor.shape,
            ),
        )

    # -- symmetric tensors ----------------------------------------------------------------------------------------

    def allocate_on_host(self, nbytes: int, ctx: CallContext) -> dict[int, Tensor]:
        pieces = self.symm_mem.pieces(self._allocate(nbytes, ctx))
        return {rank: torch.frombuffer(piece, dtype=torch.uint8) for rank, piece in enumerate(pieces)}

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, ctx: CallContext, *, owner: int | None = None
    ) -> Tensor:
        """Return an uninitialised tensor, at one place of all ranks' heaps, or in `owner`'s. All ranks call it."""
        buffer = self._allocate(math.prod(shape) * dtype.itemsize, ctx, owner)
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def _allocate(self, nbytes: int, ctx: CallContext, owner: int | None = None) -> Buffer:
        deadline = Deadline.after(ctx.timeout_s)
        with self.exclusive(ctx.timeout_s):
            return self.symm_mem.allocate(
                nbytes, deadline, ctx.call_site, lambda status: self.check(status, ctx), owner=owner
            )
