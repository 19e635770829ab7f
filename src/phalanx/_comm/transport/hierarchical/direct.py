"""Send data directly from rank to rank, for gather, scatter and all_to_all.

Each byte has one destination, so it crosses a link between hosts at most once, whichever rank sends it. Each rank
therefore sends its own bytes to other hosts, while bytes for the same host are copied in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx._base.core_numbers import BYTES
from phalanx._base.deadline import Deadline, timeout_ns
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.call import Disagreement, compare_splits, describe_call
from phalanx._comm.transport.hierarchical.agreement import Agreement
from phalanx._comm.transport.hierarchical.rails import RailMessage, as_connection_broken
from phalanx._comm.transport.hierarchical.segmented import SegmentedCollectives
from phalanx._comm.transport.hierarchical.small import SmallCollectives
from phalanx._comm.transport.tensors import alias, dense, nbytes, write_all_back, write_back


class DirectCollectives:
    """`DirectCollectives` are the collectives with one destination for each byte; the ranks agree, then move data."""

    def __init__(self, agreement: Agreement, small: SmallCollectives, segmented: SegmentedCollectives) -> None:
        self._agreement = agreement
        self._session = agreement.session
        self._layout = agreement.session.layout
        self._rank = agreement.session.rank
        self._world_size = agreement.session.world_size
        self._small = small
        self._segmented = segmented

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int, ctx: CallContext) -> None:
        data, parts = dense(tensor), [dense(t) for t in outputs]
        everybody, local = range(self._world_size), self._layout.local_ranks
        with self._session.running(describe_call("gather", data, self._session.place(ctx), root=root), ctx) as deadline:
            self._agreement.agree(ctx, deadline)
            to_root = [data if r == root else None for r in everybody]
            messages = self._swap(to_root, parts or [None] * self._world_size, deadline)
            if root in local:
                at = tuple(parts[r].data_ptr() for r in local) if parts else None
                sizes, local_root = (nbytes(data),) * len(local), local.index(root)
                left = timeout_ns(deadline.left_s)
                self._agreement.check(
                    self._session.core.gather(
                        data.data_ptr(), at, sizes, BYTES, local_root, left, ctx.call_site, data.shape
                    )
                )
            _wait_all(messages)
            write_all_back(outputs, parts)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, ctx: CallContext) -> None:
        """Write root's inputs[rank] to `output`; on the other ranks `inputs` is empty."""
        output, parts = alias(output), [dense(alias(t)) for t in inputs]
        data = dense(output)
        everybody, local = range(self._world_size), self._layout.local_ranks
        with self._session.running(
            describe_call("scatter", data, self._session.place(ctx), root=root), ctx
        ) as deadline:
            self._agreement.agree(ctx, deadline)
            from_root = [data if r == root else None for r in everybody]
            messages = self._swap(parts or [None] * self._world_size, from_root, deadline)
            if root in local:
                at = tuple(parts[r].data_ptr() for r in local) if parts else None
                local_root, left = local.index(root), timeout_ns(deadline.left_s)
                self._agreement.check(
                    self._session.core.scatter(
                        at, data.data_ptr(), nbytes(data), BYTES, local_root, left, ctx.call_site, data.shape
                    )
                )
            _wait_all(messages)
            write_back(output, data)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], ctx: CallContext, *, splits: bool
    ) -> None:
        """Write rank r's inputs[rank] to outputs[r]; with `splits` sizes may differ, and are compared across ranks."""
        outputs, src = [alias(t) for t in outputs], [dense(alias(t)) for t in inputs]
        dst = [dense(t) for t in outputs]
        # As on one host, some ranks may pass splits while others do not; only the sizes are compared.
        call = describe_call("all_to_all", src[0], self._session.place(ctx), count=-1)
        sent, awaited = [nbytes(t) for t in src], [nbytes(t) for t in dst]
        table = torch.tensor([sent, awaited], device="cpu")
        tables = torch.empty((self._world_size, *table.shape), dtype=table.dtype, device="cpu")
        with self._session.running(call, ctx) as deadline:
            flat, sizes = tables.view(-1).view(torch.uint8), (nbytes(table),) * self._world_size
            if self._small.fits(len(flat)):
                self._small.gather_bytes((table.data_ptr(), nbytes(table)), flat, sizes, ctx, deadline)
            else:
                self._agreement.agree(ctx, deadline)
                mine = table.view(-1).view(torch.uint8)
                self._segmented.all_gather_bytes(mine, torch.split(flat, nbytes(table)), ctx, deadline)
            if calls := compare_splits(tables.tolist()):
                raise Disagreement(calls)
            messages = self._swap(src, dst, deadline)
            local = self._layout.local_ranks
            if len(local) > 1:
                self._agreement.check(
                    self._session.core.all_to_all(
                        tuple(src[r].data_ptr() for r in local),
                        tuple(sent[r] for r in local),
                        tuple(dst[r].data_ptr() for r in local),
                        tuple(awaited[r] for r in local),
                        BYTES,
                        1,
                        timeout_ns(deadline.left_s),
                        ctx.call_site,
                        src[0].shape,
                    )
                )
            else:
                dst[self._rank].copy_(src[self._rank].view(dst[self._rank].shape))
            _wait_all(messages)
            write_all_back(outputs, dst)

    def _swap(
        self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], deadline: Deadline
    ) -> list[RailMessage]:
        """Start to send sends[r] to, and receive receives[r] from, each rank r on other hosts; skip None."""
        messages = []
        # Receives first: Gloo sends data only after the receiver has notified the sender. A notification queued behind
        # the receiver's own data would be late, and the link would carry one direction at a time.
        for start, tensors in ((self._session.engine.recv, receives), (self._session.engine.send, sends)):
            for r, tensor in enumerate(tensors):
                if r not in self._layout.local_ranks and tensor is not None and tensor.numel():
                    with as_connection_broken(r):
                        messages.append(RailMessage(start(r, tensor, self._agreement.stream(0)), r, deadline))
        return messages


def _wait_all(messages: Sequence[RailMessage]) -> None:
    for message in messages:
        message.wait()
