"""`HierarchicalTransport` runs a group whose ranks are on several hosts.

It has a session, which wraps each operation, an agreement, and collectives of four kinds: small, segmented, direct, and
the engine's own. It chooses among the kinds by operation, size, layout and options.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx._base.core_numbers import SUM
from phalanx._comm.diagnostics.failure_store import FailureStore
from phalanx._comm.engines.engine import Engine
from phalanx._comm.symmetric_memory.memory import SymmetricMemory
from phalanx._comm.transport.base import CallContext, Transport
from phalanx._comm.transport.call import CollectiveCall, describe_call
from phalanx._comm.transport.hierarchical.agreement import Agreement
from phalanx._comm.transport.hierarchical.by_engine import EngineCollectives
from phalanx._comm.transport.hierarchical.direct import DirectCollectives
from phalanx._comm.transport.hierarchical.messages import HierarchicalMessages
from phalanx._comm.transport.hierarchical.preceding import Action, PrecedingMessages
from phalanx._comm.transport.hierarchical.segmented import SegmentedCollectives
from phalanx._comm.transport.hierarchical.session import HierarchicalSession
from phalanx._comm.transport.hierarchical.small import SmallCollectives
from phalanx._comm.transport.tensors import alias, dense, is_plain, nbytes, scaled, write_back


class HierarchicalTransport(Transport):
    """A `HierarchicalTransport` runs operations of ranks on several hosts: in shared memory, and over an engine.

    Raises:
        MismatchError: the ranks' calls differ; no tensor was changed.
        PeerLostError, DeadlineError: a rank died or is late; the tensors hold undefined values.
    """

    is_interruptible = False  # the engine may block in C++

    agreement: Agreement
    """The agreement with which each collective begins."""

    def __init__(self, session: HierarchicalSession) -> None:
        self.group = session.group
        self.layout = session.layout
        self.rank = session.rank
        self.world_size = session.world_size
        self.lock = session.lock
        self.session = session
        """The session that begins and ends each operation."""
        self.agreement = Agreement(session)
        self._small = SmallCollectives(self.agreement)
        self._segmented = SegmentedCollectives(self.agreement)
        self._by_engine: EngineCollectives | None = None
        self._direct = DirectCollectives(self.agreement, self._small, self._segmented)
        self._messages = HierarchicalMessages(session)

    def attach(self, symm_mem: SymmetricMemory, engine: Engine, failure_store: FailureStore) -> None:
        """Set the memory, the engine and the store. Call this before the first operation."""
        self.session.attach(symm_mem, engine, failure_store)
        self._by_engine = EngineCollectives.of(self.agreement, engine)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        return self.layout.topology.hosts

    @property
    def engine(self) -> Engine:
        """Return the engine, which sends data between the hosts."""
        return self.session.engine

    # -- state and the end ---------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self.session.closed

    @property
    def seq(self) -> int:
        return self.session.seq

    def call_site(self, place: tuple[str, int]) -> int:
        return self.session.call_site(place)

    def set_exit_reason(self, exit_reason: str) -> None:
        self.session.set_exit_reason(exit_reason)

    def leave_in_flight(self) -> None:
        self.session.leave_in_flight()

    def close(self) -> None:
        self.session.close()

    def interrupted(self, error: BaseException, *, what: str = "", peer: int = -1) -> None:
        self.session.reports.interrupted(error, what=what, peer=peer)

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, dst: int, tag: int, ctx: CallContext) -> None:
        """Send `tensor`, and return when its memory may be reused. This may wait for the matching receive."""
        self._messages.send(tensor, dst, tag, ctx)

    def recv(self, tensor: Tensor, src: int, tag: int, ctx: CallContext) -> int:
        return self._messages.recv(tensor, src, tag, ctx)

    def open_preceding(self, max_bytes: int, senders: Sequence[int]) -> PrecedingMessages:
        """Return this rank's end of messages that precede collectives. All ranks call this together."""
        return self.session.preceding.open(self.engine, max_bytes, senders)

    def precede(self, action: Action) -> None:
        """Call `action` in the next collective, before this rank joins it; drop `action` if there is none."""
        self.session.preceding.action = action

    # -- collectives ---------------------------------------------------------------------------------------------

    def barrier(self, ctx: CallContext) -> None:
        """Wait for every rank. Cost: H - 1 messages from each host's leader, or ceil(log2 H) with more than 3 hosts."""
        self._small.barrier(CollectiveCall("barrier", place=self.session.place(ctx)), ctx)

    def allocate_on_host(self, nbytes: int, ctx: CallContext) -> dict[int, Tensor]:
        """Allocate memory as described in `Transport`, separately on each host; this counts as one collective."""
        found: dict[int, Tensor] = {}
        call = CollectiveCall("barrier", count=nbytes, place=self.session.place(ctx))
        self.session.interruptible(call, ctx, lambda: found.update(self._allocate_on_host(nbytes, call, ctx)))
        return found

    def _allocate_on_host(self, nbytes: int, call: CollectiveCall, ctx: CallContext) -> dict[int, Tensor]:
        with self.session.running(call, ctx) as deadline:
            self.agreement.agree(ctx, deadline)
            memory = self.session.symm_mem
            pieces = memory.pieces(memory.allocate(nbytes, deadline, ctx.call_site, self.agreement.check))
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
        """Reduce `tensor` over ranks in place, on all ranks or only on `root`; multiply each input by `factor` first.

        Cost: of a small tensor of S bytes, S(H-1) bytes leave each of H hosts at once; of a large one, 2S(H-1)/H.
        Numerics: half types are summed in float32 and rounded once; AVG divides the sum once; bitwise equal on all
        ranks.
        """
        tensor = alias(tensor)
        call = describe_call(
            "all_reduce" if root < 0 else "reduce", tensor, self.session.place(ctx), redop=redop, root=root
        )
        if self._small.fits_sum(tensor.dtype, redop, tensor.numel()):
            self._small.all_reduce(tensor, call, redop, ctx, root=root, factor=factor)
        elif self._by_engine is not None and self._by_engine.reduces(tensor.dtype, redop):
            self._by_engine.all_reduce(tensor, call, redop, ctx, root=root, factor=factor)
        else:
            run = partial(self._segmented.all_reduce, tensor, call, redop, ctx, root=root, factor=factor)
            self.session.interruptible(call, ctx, run)

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """Write the reduction over ranks of inputs[rank] to `output`; the inputs may differ in size.

        Cost: of S bytes in all, S(H-1)/H leave each of H hosts.
        """
        output, inputs = alias(output), [alias(t) for t in inputs]
        counts = tuple(t.numel() for t in inputs)
        call = describe_call(
            "reduce_scatter", output, self.session.place(ctx), redop=redop, count=sum(counts), sizes=counts
        )
        if self._small.fits_sum(output.dtype, redop, sum(counts)):
            scaled_inputs = [scaled(t, factor) for t in inputs]
            self._small.reduce_scatter(output, scaled_inputs, call, redop, ctx)
        else:
            self.session.interruptible(
                call, ctx, partial(self._segmented.reduce_scatter, output, inputs, call, redop, ctx, factor)
            )

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """Split `tensor` in equal parts, and write the reduction over ranks of this rank's part to `output`."""
        flat = dense(alias(tensor)).view(-1)
        self.reduce_scatter(output, torch.split(flat, [output.numel()] * self.world_size), redop, ctx, factor=factor)

    # -- moves ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int, ctx: CallContext) -> None:
        """Overwrite `tensor` on every rank with root's. Cost: S bytes to each host to which this host sends data."""
        tensor = alias(tensor)
        call = describe_call("broadcast", tensor, self.session.place(ctx), root=root)
        if self._small.fits(nbytes(tensor)):
            self._small.broadcast(tensor, call, root, ctx)
        elif self._by_engine is not None:
            self._by_engine.broadcast(tensor, call, root, ctx)
        else:
            self.session.interruptible(call, ctx, partial(self._segmented.broadcast, tensor, call, root, ctx))

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, ctx: CallContext, *, root: int = -1) -> None:
        """Write rank r's `tensor` to outputs[r], on every rank or only on `root`; elsewhere `outputs` is empty.

        Cost: of S bytes in all, S(H-1)/H leave each of H hosts; with a `root`, each byte leaves a host at most once.
        """
        tensor, outputs = alias(tensor), [alias(t) for t in outputs]
        if root >= 0:
            self.session.interruptible(
                CollectiveCall("gather"), ctx, partial(self._direct.gather, outputs, tensor, root, ctx)
            )
            return
        sizes = tuple(nbytes(t) for t in outputs)
        call = describe_call("all_gather", tensor, self.session.place(ctx), count=sum(sizes), sizes=sizes)
        if self._small.fits(sum(sizes)):
            self._small.all_gather(outputs, tensor, call, sizes, ctx)
        else:
            self.session.interruptible(call, ctx, partial(self._segmented.all_gather, outputs, tensor, call, ctx))

    def all_gather_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """Write rank r's `tensor` to part r of `output`, which is split in world_size equal parts."""
        output, tensor = alias(output), alias(tensor)
        call = describe_call("all_gather", tensor, self.session.place(ctx))
        sizes = (nbytes(tensor),) * self.world_size
        if self._small.fits(sum(sizes)):
            self._small.all_gather([output], tensor, call, sizes, ctx)
            return
        whole = output if is_plain(output) else torch.empty(output.shape, dtype=output.dtype, device="cpu")
        parts = list(torch.split(whole.view(-1), tensor.numel()))
        self.session.interruptible(call, ctx, partial(self._segmented.all_gather, parts, tensor, call, ctx))
        write_back(output, whole)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, ctx: CallContext) -> None:
        """Write root's inputs[rank] to `output`; on the other ranks `inputs` is empty."""
        self.session.interruptible(
            CollectiveCall("scatter"), ctx, partial(self._direct.scatter, output, inputs, root, ctx)
        )

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], ctx: CallContext, *, splits: bool
    ) -> None:
        """Write rank r's inputs[rank] to outputs[r]; with `splits` sizes may differ, and are compared across ranks."""
        self.session.interruptible(
            CollectiveCall("all_to_all"), ctx, partial(self._direct.all_to_all, outputs, inputs, ctx, splits=splits)
        )

    def all_to_all_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """Exchange the equal parts of two contiguous tensors as `all_to_all` does."""
        parts = [list(alias(t).view(-1).chunk(self.world_size)) for t in (output, tensor)]
        if tensor.numel() == 0:
            parts = [[alias(t)] * self.world_size for t in (output, tensor)]
        self.all_to_all(parts[0], parts[1], ctx, splits=False)
