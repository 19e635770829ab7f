"""The operations of one host: tensors in, the C core underneath, errors that tell the story. All of them block."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.coordination.bootstrap import NOTICE_S
from phalanx.deadline import Deadline
from phalanx.diagnostics import failures
from phalanx.diagnostics.call_sites import short
from phalanx.diagnostics.failure_report import LEFT_IN_FLIGHT, closed, describe_wait, nested
from phalanx.diagnostics.flight_recorder import read
from phalanx.diagnostics.whereabouts import find_position, late_ranks, remember
from phalanx.dtypes import dtype_of
from phalanx.errors import ClosedError, DeadlineError
from phalanx.log import get_logger
from phalanx.symmetric_memory.memory import STAGE_BYTES, Buffer, SymmetricMemory, timeout_ns
from phalanx.transport.uneven import UnevenInputs

_logger = get_logger(__name__)
_MAX_SITES = 256


class CallContext:
    """How long an operation may take, where it was called, and in which role (see `uneven`).

    `timeout_s` seconds; `site` is the place in the rank's table, and above its lower 16 bits the role.

    `awaited`: whoever called it waits for it, whichever thread carries it out.
    """

    __slots__ = ("awaited", "site", "timeout_ns", "timeout_s")

    def __init__(self, timeout_s: float, site: int, role: int = 0) -> None:
        self.awaited = False
        self.timeout_s = timeout_s
        self.timeout_ns = timeout_ns(timeout_s)
        self.site = site | role << 16


class SharedMemory:
    """All ranks of the group are on this host. Tensors are on the CPU and checked by the caller.

    One collective at a time: `lock` is held while the core runs one. Point to point needs no lock across channels.
    """

    def __init__(self, group: str) -> None:
        self.group = group
        self.lock = threading.Lock()
        self._holder = 0  # the thread that has it; a signal handler runs in that very thread
        self.uneven: UnevenInputs | None = None  # of those who train over the group
        self.symm_mem: SymmetricMemory = None  # type: ignore[assignment]  # set by `attach`: it needs our `idle`
        self._sites: dict[tuple[str, int], int] = {}
        self._places: dict[int, str] = {}
        self._areas: dict[int, list[Buffer]] = {}  # for `broadcast_buffers`, by their size
        self._said_at = 0
        self._say_again_s = 0.0

    def attach(self, symm_mem: SymmetricMemory) -> None:
        """Take the seat; before the first operation."""
        self.symm_mem = symm_mem
        self.core = symm_mem.core
        remember(self)

    @property
    def closed(self) -> bool:
        """Whether this process has left."""
        return self.symm_mem.closed

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self.symm_mem.world_size

    @property
    def seq(self) -> int:
        """How many collectives this rank has begun."""
        return self.core.seq

    # -- the end -------------------------------------------------------------------------------------------------

    def leave_note(self, note: str) -> None:
        """How this process ends, for those who will miss it."""
        self.core.set_note(note)

    def leave_in_flight(self) -> None:
        """Operations are still running here: end the group, so that they wake up before its memory goes."""
        self.core.set_note(LEFT_IN_FLIGHT)
        self.core.set_poison(failures.PEER_LOST, self.symm_mem.rank)

    def settle(self, patience_s: float) -> bool:
        """Whether no thread of this process is in an operation, after at most `patience_s`.

        In a signal handler the operation that it interrupted is not waited for.
        """
        return self.core.settle(timeout_ns(patience_s))

    def close(self) -> None:
        """Leave. Whoever waits for this rank hears it at once, and so does whoever is in an operation here."""
        self.symm_mem.close()

    def close_for_good(self) -> None:
        """As `close`, at the end of the process, while threads are in operations: nothing happens to them."""
        self.symm_mem.close_for_good()

    # -- around an operation -------------------------------------------------------------------------------------

    def site(self, place: tuple[str, int]) -> int:
        """The number of a (file, line) in the table that other ranks and the agent can read."""
        number = self._sites.get(place)
        if number is None:
            if len(self._sites) >= _MAX_SITES:
                self._sites.clear()
                self._places.clear()
            text = f"{short(place[0])}:{place[1]}" if place[0] else ""
            try:
                number = self.core.add_site(text)
            except ClosedError:
                raise closed(self.group) from None
            self._sites[place] = number
            self._places[number] = text
        return number

    def place(self, number: int) -> str:
        """The 'file:line' that `site` gave this number, or nothing."""
        return self._places.get(number, "")

    def idle(self, waited_s: float) -> None:
        """The core calls this while it waits: say who is missing, and again after as long again, who is then."""
        if waited_s < NOTICE_S or self.symm_mem is None or self.symm_mem.closed:
            return
        with contextlib.suppress(ClosedError):  # meanwhile, by another thread: whoever waits is about to hear it
            self._tell_wait(waited_s)

    def _tell_wait(self, waited_s: float) -> None:
        records = read(self.core, self.symm_mem.rank)
        if not records or (records[-1].enter_ns == self._said_at and waited_s < self._say_again_s):
            return
        last = records[-1]
        self._said_at, self._say_again_s = last.enter_ns, 2 * waited_s
        missing = late_ranks(self.core, self.symm_mem.rank, self.symm_mem.world_size) if last.is_collective else []
        if last.is_collective and not missing and self.core.culprit not in (-1, self.symm_mem.rank):
            missing = [self.core.culprit]  # in a round of gradients no rank has come further: the core looks at flags
        if not last.is_collective and last.peer >= 0:
            missing = [last.peer]
        where = "; ".join(f"rank {r} {find_position(self.symm_mem, r)}" for r in missing[:8])
        where = where or ("other ranks" if last.is_collective else "a message")
        _logger.warning("%s", describe_wait(last.label, self.group, self.symm_mem.rank, missing, waited_s, where))

    def check(self, status: int, ctx: CallContext, *, kind: int = 0, peer: int = -1) -> None:
        """Raise the error that `status` stands for, if it is one; `kind` and `peer` if it was a message's."""
        if status:
            try:
                error = failures.failure(status, self.symm_mem, self.group, ctx.timeout_s, kind=kind, peer=peer)
            except ClosedError:  # before the memory could be read, by another thread
                error = closed(self.group)
            raise error

    def _collective(self, ctx: CallContext, call: Callable[[], int]) -> None:
        status = failures.REJOIN
        while status == failures.REJOIN:
            with self.turn(ctx.timeout_s):
                try:
                    status = call()
                except BaseException as error:
                    self._interrupted(error)
                    raise
            if status == failures.REJOIN:
                self._rejoin()
        if status:
            self.check(status, ctx)

    @contextlib.contextmanager
    def turn(self, timeout_s: float) -> Iterator[None]:
        """Hold `lock`, for one collective.

        Raises:
            PhalanxError: this is a signal handler, and the collective that it interrupted waits for its end.
            DeadlineError: the other thread's collective was not over in time.
        """
        me = threading.get_ident()
        if self.lock.locked():
            self._await_turn(timeout_s)
        with self.lock:
            self._holder = me  # and nothing before it that a signal handler could come after
            try:
                yield
            finally:
                self._holder = 0

    @property
    def in_turn(self) -> bool:
        """Whether this thread is in a collective already: it runs a signal handler that interrupted it."""
        return self._holder == threading.get_ident()

    def _await_turn(self, timeout_s: float) -> None:
        if self.in_turn:
            raise nested("a collective", self.group, self.symm_mem.rank)
        if not self.lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise DeadlineError(
                f"group {self.group!r} on rank {self.symm_mem.rank}: another thread's collective was still under way "
                f"after {timeout_s:.1f} s, so this one could not begin.\n"
                "Let one thread call the collectives of a group, or give each thread a group of its own."
            )
        self.lock.release()

    def _rejoin(self) -> None:
        """All wait at this collective, and some were out of training steps; after this it is called again."""
        assert self.uneven is not None  # it is what made the core look
        self.uneven.rejoin()

    def _interrupted(self, error: BaseException) -> None:
        """Ctrl-C, or a signal handler that raised, ended the wait: the peers should hear why."""
        with contextlib.suppress(ClosedError):
            self.core.set_note(type(error).__name__)

    # -- collectives ---------------------------------------------------------------------------------------------

    def barrier(self, ctx: CallContext) -> None:
        """Return when every rank has come."""
        self._collective(ctx, lambda: self.core.barrier(ctx.timeout_ns, ctx.site, ()))

    def sum_in_place(self, tensor: Tensor, code: int, timeout_s: float, place: tuple[str, int]) -> None:
        """As `all_reduce` with SUM, for a contiguous tensor of a real dtype: the shortest way to the core."""
        if self.symm_mem.one_memory:
            self._refuse_one_memory(tensor)
        site = self._sites.get(place)
        at = tensor.data_ptr()
        me = threading.get_ident()
        if self.lock.locked():
            self._await_turn(timeout_s)
        with self.lock:  # `turn`, spelt out
            self._holder = me
            try:
                status = self.core.all_reduce(
                    at,
                    at,
                    tensor.numel(),
                    code,
                    0,
                    -1,
                    timeout_ns(timeout_s),
                    self.site(place) if site is None else site,
                    tensor.shape,
                )
            except BaseException as error:
                self._interrupted(error)
                raise
            finally:
                self._holder = 0
        if status == failures.REJOIN:
            self._rejoin()
            self.sum_in_place(tensor, code, timeout_s, place)
        elif status:
            self.check(status, CallContext(timeout_s, 0))

    def all_reduce(self, tensor: Tensor, redop: int, ctx: CallContext, *, root: int = -1, factor: Any = None) -> None:
        """`tensor` becomes the reduction over ranks, everywhere or on `root`; each input times `factor` first.

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
                ctx.site,
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
        """`tensor` becomes root's."""
        data = dense(tensor)
        self._collective(
            ctx,
            lambda: self.core.broadcast(
                data.data_ptr(), nbytes(data), dtype_of(data.dtype).code, root, ctx.timeout_ns, ctx.site, tensor.shape
            ),
        )
        if data is not tensor and root != self.symm_mem.rank:
            write_back(tensor, data)

    def broadcast_buffers(self, tensor: Tensor, root: int, ctx: CallContext, *, number: int) -> None:
        """As `broadcast`, but the root waits for nobody, and the others for the root alone; see csrc/early.h.

        Whether all ranks called it, with the same `number`, is asked when the next collective begins.
        """
        data = dense(tensor)
        # Held here until the call is over: the heap may go with the last block of it.
        area = self._area(nbytes(data), ctx) if nbytes(data) > STAGE_BYTES and self.world_size > 1 else None
        self._collective(
            ctx,
            lambda: self.core.broadcast_buffers(
                data.data_ptr(),
                nbytes(data),
                ctypes.addressof(area) if area is not None else 0,
                dtype_of(data.dtype).code,
                root,
                number,
                ctx.timeout_ns,
                ctx.site,
                tensor.shape,
            ),
        )
        if data is not tensor and root != self.symm_mem.rank:
            write_back(tensor, data)

    def _area(self, size: int, ctx: CallContext) -> Buffer:
        """Where in this rank's heap `size` bytes lie this time; two areas take turns. Collective where they are new."""
        areas = self._areas.get(size)
        if areas is None:
            with self.turn(ctx.timeout_s):
                deadline = Deadline.after(ctx.timeout_s)
                areas = [
                    self.symm_mem.allocate(size, deadline, ctx.site, lambda status: self.check(status, ctx))
                    for _ in range(2)
                ]
            self._areas[size] = areas
        areas.reverse()
        return areas[0]

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, ctx: CallContext, *, root: int = -1) -> None:
        """outputs[r] becomes rank r's `tensor`, everywhere or on `root`; elsewhere `outputs` is empty."""
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
                ctx.site,
                tensor.shape,
            ),
        )
        for output, got in zip(outputs, dst, strict=True):
            if got is not output:
                write_back(output, got)

    def all_gather_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """`output`, split in world_size equal parts, becomes all ranks' `tensor`s."""
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
                ctx.site,
                tensor.shape,
            ),
        )
        if dst is not output:
            write_back(output, dst)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, ctx: CallContext) -> None:
        """`output` becomes root's inputs[rank]; elsewhere `inputs` is empty."""
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
                ctx.site,
                output.shape,
            ),
        )
        if dst is not output:
            write_back(output, dst)

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """`output` becomes the reduction over ranks of inputs[rank]; the inputs may differ in size."""
        src, dst = [dense(scaled(t, factor)) for t in inputs], dense(output)
        self._reduce_scatter(
            tuple(t.data_ptr() for t in src), tuple(t.numel() for t in src), dst, redop, ctx, output.shape
        )
        if dst is not output:
            write_back(output, dst)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """`output` becomes the reduction over ranks of the rank's part of `tensor`, split in equal parts."""
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
                addresses, counts, dst.data_ptr(), dtype_of(dst.dtype).code, redop, ctx.timeout_ns, ctx.site, shape
            ),
        )

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], ctx: CallContext, *, splits: bool
    ) -> None:
        """outputs[r] becomes rank r's inputs[rank]. `splits`: sizes may differ, and are compared across ranks."""
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
                ctx.site,
                src[0].shape,
            ),
        )
        for output, got in zip(outputs, dst, strict=True):
            if got is not output:
                write_back(output, got)

    def all_to_all_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """As `all_to_all` with the equal parts of two contiguous tensors, without cutting them into views."""
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
                ctx.site,
                tensor.shape,
            ),
        )

    # -- point to point ------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, tag: int, ctx: CallContext) -> None:
        """Return when the bytes of `tensor` have left it."""
        data = dense(tensor)
        code = dtype_of(data.dtype).code
        self.check(
            self.core.send(data.data_ptr(), nbytes(data), dst, tag, code, ctx.timeout_ns, ctx.site, tensor.shape),
            ctx,
            kind=failures.SEND,
            peer=dst,
        )

    def send_now(self, tensor: Tensor, dst: int, tag: int, ctx: CallContext) -> bool:
        """As `send` if that needs no waiting; else False, and nothing has happened."""
        data = dense(tensor)
        code = dtype_of(data.dtype).code
        status = self.core.send_now(
            data.data_ptr(), nbytes(data), dst, tag, code, ctx.timeout_ns, ctx.site, tensor.shape
        )
        if status:
            self.check(status, ctx, kind=failures.SEND, peer=dst)
        return status is not None


def is_plain(tensor: Tensor) -> bool:
    """Whether the elements lie in order in memory and mean what they say."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg() and not tensor._is_zerotensor()


def dense(tensor: Tensor) -> Tensor:
    """`tensor` itself if it is plain; else a copy that is."""
    if is_plain(tensor):
        return tensor
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def scaled(tensor: Tensor, factor: Any) -> Tensor:
    """`tensor` itself without a factor; else its product with it, in its own dtype whatever the factor's is."""
    if factor is None:
        return tensor
    with torch.no_grad():
        product: Tensor = (tensor * factor).to(tensor.dtype)
        return product


def write_back(tensor: Tensor, data: Tensor) -> None:
    """Copy `data` into a tensor whose own memory could not be used."""
    # Only inference mode may write to its tensors, and it belongs to the thread: this may be another than the caller's.
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        tensor.copy_(data)


def nbytes(tensor: Tensor) -> int:
    """Bytes of the elements."""
    return tensor.numel() * tensor.element_size()
