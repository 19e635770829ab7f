"""Run groups of one host: every rank maps the memory of all ranks, and the C core moves and combines data in it.

A collective passes its tensors to the core, which also compares the calls. Messages go through a ring buffer per pair
of ranks, and are matched with posted receives.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx import _core
from phalanx._base.core_numbers import OK, PEER_LOST, RECV, SEND, SUM
from phalanx._base.deadline import Deadline, timeout_ns
from phalanx._base.dtypes import dtype_of
from phalanx._base.log import get_logger
from phalanx._comm.diagnostics import failures
from phalanx._comm.diagnostics.call_sites import short
from phalanx._comm.diagnostics.failure_report import LEFT_IN_FLIGHT, closed, describe_wait, occupied
from phalanx._comm.diagnostics.flight_recorder import read
from phalanx._comm.diagnostics.whereabouts import find_position, late_ranks, notify_end, register
from phalanx._comm.rendezvous.bootstrap import NOTICE_S
from phalanx._comm.symmetric_memory.memory import STAGE_BYTES, Buffer, SymmetricMemory
from phalanx._comm.transport.base import CallContext, Transport
from phalanx._comm.transport.tensors import dense, is_plain, nbytes, scaled, write_all_back, write_back
from phalanx.errors import ClosedError

_logger = get_logger(__name__)
_MAX_SITES = 256
_NEVER_NS = (1 << 64) - 1


class PostedReceive:
    """A `PostedReceive` is a receive that is matched with a message by sender and tag, in the order of posting.

    It is complete once any receiving thread of this rank has found its message, or has found that the sender is gone.
    """

    def __init__(
        self, memory: SharedMemoryTransport, tensor: Tensor, src: int, tag: int, ctx: CallContext, *, handed_over: bool
    ) -> None:
        self._memory = memory
        self._tensor = tensor
        self._data = dense(tensor)
        self._peer = src
        self._ctx = ctx
        self._is_awaited = False
        self.handle = _core.Receive()
        self._code = memory.core.post(
            self.handle,
            self._data.data_ptr(),
            nbytes(self._data),
            src,
            tag,
            dtype_of(self._data.dtype).code,
            handed_over,
            _NEVER_NS if handed_over else ctx.timeout_ns,
            ctx.call_site,
            tensor.shape,
        )

    @property
    def has_arrived(self) -> bool:
        """Return whether the message had arrived when the receive was posted."""
        return self._code == OK

    def begin_timeout(self) -> None:
        """Start the timeout of the receive, once, because a thread now waits for it. If it expires, the group fails."""
        if not self._is_awaited:
            self._is_awaited = True
            self._memory.core.set_timeout(self.handle, self._ctx.timeout_ns)

    @property
    def is_pending(self) -> bool:
        """Return whether the message has not arrived, and nothing has ended the wait for it."""
        return self.handle.status == _core.PENDING

    @property
    def source(self) -> int:
        """Return the rank that sent the message, once the receive is no longer pending."""
        return self.handle.source

    def conclude(self) -> None:
        """Copy the message to the tensor, or raise the error. Call this once, when the receive is no longer pending.

        Afterwards the receive holds no reference to the tensor, even if the caller keeps the receive.
        """
        tensor, data = self._tensor, self._data
        del self._tensor, self._data
        status = self.handle.status if self._code in (OK, _core.PENDING) else self._code  # it may not have been posted
        self._memory.check(status, self._ctx, kind=RECV, peer=self._peer)
        write_back(tensor, data)


class SharedMemoryTransport(Transport):
    """A `SharedMemoryTransport` runs a group whose ranks are all on this host: each rank maps the memory of all ranks.

    It runs one collective at a time, and holds `lock` meanwhile. All ranks read and write tensors in the symmetric heap
    in place. Messages do not need `lock`; between two ranks, they keep their order per tag.
    """

    ranks_share_memory = True
    closes_in_flight = True
    eager_bytes = 32768  # a second rendezvous of the ranks costs more than sending unused bytes

    def __init__(self, group: str) -> None:
        self.group = group
        self.lock = threading.Lock()  # held while the core runs a collective
        self.symm_mem: SymmetricMemory = None  # type: ignore[assignment]  # set by `attach`: it needs our `idle`
        self._sites: dict[tuple[str, int], int] = {}
        self._places: dict[int, str] = {}
        self._areas: dict[int, list[Buffer]] = {}  # the two areas for `broadcast_buffers`, by their size
        self._warned_at = 0
        self._warn_again_s = 0.0

    def attach(self, symm_mem: SymmetricMemory) -> None:
        """Set the memory. Call this before the first operation."""
        self.symm_mem = symm_mem
        self.rank, self.world_size = symm_mem.rank, symm_mem.world_size
        self.core = symm_mem.core
        register(self)

    @property
    def closed(self) -> bool:
        return self.symm_mem.closed

    @property
    def seq(self) -> int:
        """Return the number of collectives that this rank has begun."""
        return self.core.seq

    # -- the end -------------------------------------------------------------------------------------------------

    def set_exit_reason(self, exit_reason: str) -> None:
        """Set how this process ends, as text for the other ranks' errors."""
        self.core.set_exit_reason(exit_reason)

    def leave_in_flight(self) -> None:
        """End the group while operations of this process are running, so that they wake up before memory is freed."""
        self.core.set_exit_reason(LEFT_IN_FLIGHT)
        self.core.set_poison(PEER_LOST, self.symm_mem.rank)

    def settle(self, patience_s: float) -> bool:
        """Wait at most `patience_s`, and return whether no thread of this process is in an operation.

        In a signal handler, this does not wait for the operation that the signal interrupted.
        """
        return self.core.settle(timeout_ns(patience_s))

    def close(self) -> None:
        """Leave the group. Ranks that wait for this one, and threads in operations here, are notified at once."""
        if not self.symm_mem.closed:
            notify_end(self)
        self.symm_mem.close()

    def abandon(self) -> None:
        """Close as `close` does, at the end of the process, without waking threads that are in operations."""
        if not self.symm_mem.closed:
            notify_end(self)
        self.symm_mem.close_for_good()

    # -- around an operation -------------------------------------------------------------------------------------

    def call_site(self, place: tuple[str, int]) -> int:
        """Return the number of a (file, line) in the table that other ranks and the agent can read."""
        number = self._sites.get(place)
        if number is None:
            if len(self._sites) >= _MAX_SITES:
                self._sites.clear()
                self._places.clear()
            text = f"{short(place[0])}:{place[1]}" if place[0] else ""
            try:
                number = self.core.add_call_site(text)
            except ClosedError:
                raise closed(self.group) from None
            self._sites[place] = number
            self._places[number] = text
        return number

    def place(self, number: int) -> str:
        """Return the 'file:line' of a number from `call_site`, or ""."""
        return self._places.get(number, "")

    def idle(self, waited_s: float) -> None:
        """Warn about the missing ranks, again each time the wait has doubled. The core calls this while it waits."""
        if waited_s < NOTICE_S or self.symm_mem is None or self.symm_mem.closed:
            return
        with contextlib.suppress(ClosedError):  # another thread has closed the group, which also ends this wait
            self._warn_of_wait(waited_s)

    def _warn_of_wait(self, waited_s: float) -> None:
        records = read(self.core, self.symm_mem.rank)
        if not records or (records[-1].enter_ns == self._warned_at and waited_s < self._warn_again_s):
            return
        last = records[-1]
        self._warned_at, self._warn_again_s = last.enter_ns, 2 * waited_s
        missing = late_ranks(self.core, self.symm_mem.rank, self.symm_mem.world_size) if last.is_collective else []
        if last.is_collective and not missing and self.core.failed_rank not in (-1, self.symm_mem.rank):
            missing = [self.core.failed_rank]  # records do not show who is late in a gradient round; the core knows
        if not last.is_collective and last.peer >= 0:
            missing = [last.peer]
        where = "; ".join(f"rank {r} {find_position(self.symm_mem, r)}" for r in missing[:8])
        where = where or ("other ranks" if last.is_collective else "a message")
        _logger.warning("%s", describe_wait(last.label, self.group, self.symm_mem.rank, missing, waited_s, where))

    def check(self, status: int, ctx: CallContext, *, kind: int = 0, peer: int = -1) -> None:
        """Raise the error for `status`, unless it is OK. For a message, `kind` and `peer` describe the operation."""
        if status:
            try:
                error = failures.failure(status, self.symm_mem, self.group, ctx.timeout_s, kind=kind, peer=peer)
            except ClosedError:  # another thread closed the memory before this thread could read it
                error = closed(self.group)
            raise error

    def _collective(self, ctx: CallContext, call: Callable[[], int]) -> None:
        with self.exclusive(ctx.timeout_s):
            try:
                status = call()
            except BaseException as error:
                self._interrupted(error)
                raise
        self.check(status, ctx)

    @contextlib.contextmanager
    def exclusive(self, timeout_s: float) -> Iterator[None]:
        """Return a context manager that holds `lock` for one collective.

        Raises:
            DeadlineError: another thread's collective did not end in time.
        """
        if self.lock.locked():
            self._await_lock(timeout_s)
        with self.lock:
            yield

    def _await_lock(self, timeout_s: float) -> None:
        if not self.lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise occupied(self.group, self.symm_mem.rank, timeout_s)
        self.lock.release()

    def _interrupted(self, error: BaseException) -> None:
        """Notify the peers that Ctrl-C, or a signal handler that raised, ended the wait."""
        with contextlib.suppress(ClosedError):
            self.core.set_exit_reason(type(error).__name__)

    # -- collectives ---------------------------------------------------------------------------------------------

    def barrier(self, ctx: CallContext) -> None:
        """Wait until every rank has called this."""
        self._collective(ctx, lambda: self.core.barrier(ctx.timeout_ns, ctx.call_site, ()))

    def sum_in_place(self, tensor: Tensor, code: int, timeout_s: float, place: tuple[str, int]) -> None:
        """Run `all_reduce` with SUM on a contiguous tensor of a real dtype, with as little Python as possible."""
        if self.symm_mem.owned_blocks:
            self._refuse_one_memory(tensor)
        call_site = self._sites.get(place)
        at = tensor.data_ptr()
        if self.lock.locked():
            self._await_lock(timeout_s)
        with self.lock:  # `exclusive`, inlined for speed
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
        """Reduce `tensor` over ranks in place, on all ranks or only on `root`; multiply each input by `factor` first.

        Raises:
            ValueError: all ranks share one copy of the tensor.
        """
        if self.symm_mem.owned_blocks:
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
        if root in (-1, self.symm_mem.rank):
            write_back(tensor, dst)

    def _refuse_one_memory(self, tensor: Tensor) -> None:
        at = tensor.data_ptr()
        if tensor.numel() and any(at in addresses for addresses in list(self.symm_mem.owned_blocks.values())):
            raise ValueError(
                f"all_reduce in group {self.group!r} on rank {self.symm_mem.rank}: the tensor of shape "
                f"{tuple(tensor.shape)} is the same memory on all ranks (a parameter of ZeroRedundancyOptimizer, or "
                "shared_empty(owner=...)), so ranks would read values that other ranks have already overwritten.\n"
                "The tensor holds the same values on every rank; to reduce different values, reduce a clone."
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
        if root != self.symm_mem.rank:
            write_back(tensor, data)

    def broadcast_buffers(self, tensor: Tensor, root: int, ctx: CallContext, *, number: int) -> None:
        """Broadcast without a rendezvous: the root waits for no rank, the others only for the root; see csrc/early.h.

        The next collective checks that all ranks called this, with the same `number`.
        """
        data = dense(tensor)
        # This reference keeps the blocks until the call returns: freeing the last block may unmap the heap.
        areas = self._two_areas(nbytes(data), ctx) if nbytes(data) > STAGE_BYTES and self.world_size > 1 else []

        def call() -> int:
            areas.reverse()  # swap only once this call has the lock, and swap back if the core refuses it
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
        if root != self.symm_mem.rank:
            write_back(tensor, data)

    def _two_areas(self, size: int, ctx: CallContext) -> list[Buffer]:
        """Return two areas of `size` bytes in this rank's heap, used in turn. The first call per size is collective."""
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
        write_all_back(outputs, dst)

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
        write_back(output, dst)

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """Write the reduction over ranks of inputs[rank] to `output`; the inputs may differ in size."""
        src, dst = [dense(scaled(t, factor)) for t in inputs], dense(output)
        self._reduce_scatter(
            tuple(t.data_ptr() for t in src), tuple(t.numel() for t in src), dst, redop, ctx, output.shape
        )
        write_back(output, dst)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """Split `tensor` in equal parts, and write the reduction over ranks of this rank's part to `output`."""
        src, dst = dense(scaled(tensor, factor)), dense(output)
        at, size, world = src.data_ptr(), nbytes(dst), self.symm_mem.world_size
        addresses = tuple(at + r * size for r in range(world))
        self._reduce_scatter(addresses, (dst.numel(),) * world, dst, redop, ctx, output.shape)
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
        write_all_back(outputs, dst)

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
        """Return an uninitialised tensor at the same offset of every rank's heap, or only in `owner`'s.

        All ranks call this.
        """
        buffer = self._allocate(math.prod(shape) * dtype.itemsize, ctx, owner)
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def _allocate(self, nbytes: int, ctx: CallContext, owner: int | None = None) -> Buffer:
        deadline = Deadline.after(ctx.timeout_s)
        with self.exclusive(ctx.timeout_s):
            return self.symm_mem.allocate(
                nbytes, deadline, ctx.call_site, lambda status: self.check(status, ctx), owner=owner
            )

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, tag: int, ctx: CallContext) -> None:
        """Send `tensor`, and return when its memory may be reused."""
        data = dense(tensor)
        code = dtype_of(data.dtype).code
        self.check(
            self.core.send(data.data_ptr(), nbytes(data), dst, tag, code, ctx.timeout_ns, ctx.call_site, tensor.shape),
            ctx,
            kind=SEND,
            peer=dst,
        )

    def send_now(self, tensor: Tensor, dst: int, tag: int, ctx: CallContext) -> bool:
        """Send `tensor` if that is possible without waiting, and return True; otherwise do nothing and return False."""
        data = dense(tensor)
        code = dtype_of(data.dtype).code
        status = self.core.send_now(
            data.data_ptr(), nbytes(data), dst, tag, code, ctx.timeout_ns, ctx.call_site, tensor.shape
        )
        if status:
            self.check(status, ctx, kind=SEND, peer=dst)
        return status is not None

    def post(self, tensor: Tensor, src: int, tag: int, ctx: CallContext, *, handed_over: bool = False) -> PostedReceive:
        """Post a receive into `tensor` of the next message from `src` (any rank if negative) with `tag`; do not wait.

        With `handed_over`, a receive that is still pending gets its handle returned by the core's `take_ended` when it
        ends.
        """
        return PostedReceive(self, tensor, src, tag, ctx, handed_over=handed_over)

    def recv(self, tensor: Tensor, src: int, tag: int, ctx: CallContext) -> int:
        """Receive into `tensor` the next message from `src` (if below zero, any rank) with `tag`; return its sender."""
        receive = self.post(tensor, src, tag, ctx)
        while receive.is_pending:
            self.core.progress(receive.handle, timeout_ns(math.inf))  # up to the deadline with which it was posted
        receive.conclude()
        return receive.source
