"""Verify on all hosts that the ranks have called the same operation, before a user's tensor changes.

    1  the ranks of a host copy the heads ("headers") of their calls, and small tensors, to their leader: one sync
    2  the leaders exchange these: one message each way, or forwarded messages (see `bruck`)
    3  before writing into a user's tensor, a rank waits for its host's leader, which continues once all calls match

Between 1 and 3, data are written only to scratch memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phalanx._base.core_numbers import BYTES, MISMATCH, OK
from phalanx._base.deadline import Deadline, timeout_ns
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.call import HEAD_BYTES, Disagreement, digest_of, head_from_record, rank_call
from phalanx._comm.transport.hierarchical.exchange import SMALL_BYTES, HostMessage, all_agree
from phalanx._comm.transport.hierarchical.failure_reports import LocalFailure
from phalanx._comm.transport.hierarchical.rails import ConnectionBroken, data_tag
from phalanx._comm.transport.hierarchical.session import HierarchicalSession

Piece = tuple[int, int]
"""The address and the length in bytes of a piece of memory."""
_NOTHING: Mapping[int, Sequence[Piece]] = {}


class _Envelope:
    """An `_Envelope` is memory for the head of a rank's call, followed by the rank's data."""

    def __init__(self) -> None:
        self.tensor = torch.empty(HEAD_BYTES + SMALL_BYTES, dtype=torch.uint8, device="cpu")
        self.address = self.tensor.data_ptr()
        self.payload = self.address + HEAD_BYTES
        self._head = memoryview((ctypes.c_char * HEAD_BYTES).from_address(self.address)).cast("B")

    @property
    def head(self) -> bytes:
        return bytes(self._head)

    def pack(self, head: bytes, piece: Piece) -> None:
        self._head[:] = head
        address, nbytes = piece
        if nbytes:
            ctypes.memmove(self.payload, address, nbytes)


class Agreement:
    """An `Agreement` runs the first steps of a collective of `session`; its caller is inside `session.running`.

    A collective either calls `agree`, and may then write; or it calls the steps one by one, and sends small data along:

        gather_to_leader   send_heads   receive_heads   broadcast_from_leader
    """

    def __init__(self, session: HierarchicalSession) -> None:
        self.session = session
        self._layout = session.layout
        self._envelopes: list[_Envelope] | None = None
        self._gathered: tuple[int, ...] | None = None  # on a leader: the addresses of the envelopes, and their contents
        self._payloads: tuple[int, ...] = ()
        self._heads: Sequence[bytes] = ()  # on a leader: the heads of this host's ranks

    def stream(self, number: int) -> int:
        """Return the tag of the `number`th stream of data that the current collective sends between hosts."""
        return data_tag(digest_of(self.session.head), number)

    # -- 1 -------------------------------------------------------------------------------------------------------

    def gather_to_leader(
        self, ctx: CallContext, deadline: Deadline, mine: Piece = (0, 0), sizes: Sequence[int] | int = 0
    ) -> Sequence[int]:
        """Copy the head of this rank's call, and the data `mine`, to its host's leader.

        Local rank i has sizes[i] bytes of data; a single number is the size on every local rank. On the leader, return
        the addresses of the local ranks' data, valid until the next operation.
        """
        count = len(self._layout.local_ranks)
        if count == 1:
            self._heads = (self.session.head,)
            return (mine[0],)
        if self._envelopes is None:
            self._envelopes = [_Envelope() for _ in range(count if self.session.leaders is not None else 1)]
            if self.session.leaders is not None:
                self._gathered = tuple(envelope.address for envelope in self._envelopes)
                self._payloads = tuple(envelope.payload for envelope in self._envelopes)
        envelopes = self._envelopes
        envelopes[0].pack(self.session.head, mine)
        if isinstance(sizes, int):
            nbytes = (HEAD_BYTES + sizes,) * count
        else:
            nbytes = tuple([HEAD_BYTES + size for size in sizes])
        status = self.session.core.gather(
            envelopes[0].address,
            self._gathered,
            nbytes,
            0,
            0,
            timeout_ns(deadline.left_s),
            ctx.call_site,
            (nbytes[0],),
        )
        if status == MISMATCH and self.session.leaders is not None:
            self._report_mismatch_of_sizes(deadline)
        self.check(status)
        if self.session.leaders is None:
            return ()
        self._heads = [self.session.head, *[envelope.head for envelope in envelopes[1:]]]
        return self._payloads

    def _report_mismatch_of_sizes(self, deadline: Deadline) -> None:
        """Report that this host's ranks have data of different sizes; their flight records show the different calls."""
        called = self.session.reports.called_here()
        self._heads = [self.session.head, *(head_from_record(called[r]) for r in self._layout.local_ranks[1:])]
        try:
            self.send_heads()
            self.receive_heads(deadline)
        except ConnectionBroken:
            raise Disagreement(called) from None  # the calls certainly differ

    # -- 2 -------------------------------------------------------------------------------------------------------

    def send_heads(self, payloads: Mapping[int, Sequence[Piece]] = _NOTHING) -> None:
        """On a leader, send the other leaders the heads of this host's ranks, and payloads[h] to host h."""
        if self.session.leaders is not None:
            self.session.leaders.send(self._heads, payloads)

    def receive_heads(self, deadline: Deadline) -> Mapping[int, HostMessage]:
        """On a leader, return the other hosts' messages, if they show that all calls match; on other ranks, return {}.

        Raises:
            Disagreement: the calls differ; every leader has all ranks' calls.
        """
        if self.session.leaders is None:
            return {}
        came = self.session.leaders.receive(deadline)
        if not all_agree(self.session.head, self._heads, *[c.heads for c in came.values()]):
            calls = {}
            for host, members in enumerate(self._layout.topology.hosts):
                heads = self._heads if host == self._layout.host else came[host].heads
                calls.update({r: rank_call(head, self.session.seq) for r, head in zip(members, heads, strict=True)})
            raise Disagreement(dict(sorted(calls.items())))
        return came

    # -- 3 -------------------------------------------------------------------------------------------------------

    def agree(self, ctx: CallContext, deadline: Deadline) -> None:
        """Wait until all ranks of all hosts are known to have made the same call."""
        self.gather_to_leader(ctx, deadline)
        self.send_heads()
        self.receive_heads(deadline)
        if len(self._layout.local_ranks) > 1:
            self.check(self.session.core.barrier(timeout_ns(deadline.left_s), ctx.call_site, ()))

    def broadcast_from_leader(self, ctx: CallContext, deadline: Deadline, address: int, nbytes: int) -> None:
        """Overwrite the `nbytes` bytes at `address` with the leader's. The leader calls this after all ranks agree."""
        if len(self._layout.local_ranks) > 1:
            left = timeout_ns(deadline.left_s)
            self.check(self.session.core.broadcast(address, nbytes, BYTES, 0, left, ctx.call_site, (nbytes,)))

    # -- steps in the memory of this host ------------------------------------------------------------------------

    @staticmethod
    def check(status: int) -> None:
        """Raise `LocalFailure` unless the core's status is OK."""
        if status != OK:
            raise LocalFailure(status)

    def gather_here(
        self, mine: Tensor, parts: Sequence[Tensor], ctx: CallContext, deadline: Deadline, dtype: int = 0
    ) -> None:
        """Write local rank i's `mine` to parts[i], on every rank of the host. `mine` may be this rank's own part."""
        self.check(
            self.session.core.gather(
                mine.data_ptr(),
                tuple(part.data_ptr() for part in parts),
                tuple(part.nbytes for part in parts),
                dtype,
                -1,
                timeout_ns(deadline.left_s),
                ctx.call_site,
                mine.shape,
            )
        )

    def broadcast_here(self, data: Tensor, local_root: int, ctx: CallContext, deadline: Deadline) -> None:
        """Overwrite `data` (bytes) with the data of `local_root`, on every rank of the host."""
        at, size = data.data_ptr(), len(data)
        self.check(
            self.session.core.broadcast(
                at, size, BYTES, local_root, timeout_ns(deadline.left_s), ctx.call_site, data.shape
            )
        )
