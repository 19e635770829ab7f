"""Run collectives of small tensors, which are sent together with the heads of the ranks' calls.

ranks 0 1 ──> 0, the leader of A      2, the leader of B <── ranks 2 3      one sync in memory on each host
              0 ────────────────────> 2
              0 <──────────────────── 2                                     one message each way
ranks 0 1 <── 0                       2 ──> ranks 2 3                       one sync in memory on each host
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx import _core
from phalanx._base.deadline import Deadline
from phalanx._base.dtypes import dtype_of
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.call import CollectiveCall
from phalanx._comm.transport.hierarchical.agreement import Agreement, Piece
from phalanx._comm.transport.hierarchical.exchange import ALWAYS_SMALL_BYTES, SMALL_BYTES
from phalanx._comm.transport.numerics import divide, sum_dtype, sum_of, sum_type
from phalanx._comm.transport.tensors import dense, is_plain, nbytes, scaled, write_back


class SmallCollectives:
    """`SmallCollectives` are the collectives whose data fit into the messages of the agreement.

    Each takes `call` and the collective's arguments.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._session = agreement.session
        self._layout = agreement.session.layout
        self._rank = agreement.session.rank
        self._world_size = agreement.session.world_size

    def fits(self, size: int) -> bool:
        """Return whether a payload of `size` bytes from each host to each other host is sent with the heads."""
        return size * (self._layout.num_hosts - 1) <= SMALL_BYTES

    def fits_sum(self, dtype: torch.dtype, redop: int, count: int) -> bool:
        """Return whether a reduction of `count` elements is sent with the heads; options may limit it to 256 bytes."""
        added, session = sum_dtype(dtype, redop), self._session
        size = count * added.itemsize
        if session.options.algorithm is not None or session.compression.rounds(added, redop):
            return size <= ALWAYS_SMALL_BYTES
        return self.fits(size)

    def barrier(self, call: CollectiveCall, ctx: CallContext) -> None:
        with self._session.running(call, ctx) as deadline:
            self._agreement.agree(ctx, deadline)

    def all_reduce(
        self, tensor: Tensor, call: CollectiveCall, redop: int, ctx: CallContext, *, root: int, factor: Any
    ) -> None:
        layout = self._layout
        wanted = root in (-1, self._rank)
        wanted_here = root < 0 or root in layout.local_ranks
        with self._session.running(call, ctx) as deadline:
            source = sum_type(dense(tensor) if factor is None else dense(scaled(tensor, factor)), redop)
            at, count, size = source.data_ptr(), source.numel(), nbytes(source)
            in_place = wanted and is_plain(tensor)
            result = tensor if in_place else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            parts = self._agreement.gather_to_leader(ctx, deadline, (at, size), size)
            leaders = self._session.leaders
            if leaders is not None:
                code, op = dtype_of(source.dtype).code, sum_of(redop)
                if len(parts) > 1:
                    at = leaders.scratch
                    _core.reduce(at, tuple(parts), count, code, op)
                goes = leaders.hosts if root < 0 else (layout.topology.host_of[root],)
                self._agreement.send_heads(dict.fromkeys(goes, ((at, size),)))
                came = self._agreement.receive_heads(deadline)
                if wanted_here:
                    total = result if result.dtype == source.dtype else source
                    hosts = tuple([came[h].address if h in came else at for h in range(layout.num_hosts)])
                    _core.reduce(total.data_ptr(), hosts, count, code, op)
                    divide(total, redop, self._world_size)
                    if total is not result:
                        result.copy_(total)
            self._agreement.broadcast_from_leader(
                ctx, deadline, result.data_ptr(), nbytes(result) if wanted_here else 0
            )
            if wanted and not in_place:
                write_back(tensor, result)

    def broadcast(self, tensor: Tensor, call: CollectiveCall, root: int, ctx: CallContext) -> None:
        layout = self._layout
        with self._session.running(call, ctx) as deadline:
            mine = dense(tensor)
            size = nbytes(mine)
            is_root = root == self._rank
            data = mine if is_root or is_plain(tensor) else torch.empty_like(mine)
            sizes = [size if r == root else 0 for r in layout.local_ranks]
            parts = self._agreement.gather_to_leader(ctx, deadline, (mine.data_ptr(), size if is_root else 0), sizes)
            if self._session.leaders is not None:
                if root in layout.local_ranks:
                    piece = ((parts[layout.local_ranks.index(root)], size),)
                    self._agreement.send_heads(dict.fromkeys(range(layout.num_hosts), piece))
                    self._agreement.receive_heads(deadline)
                    came_to = piece[0][0]
                else:
                    self._agreement.send_heads()
                    came_to = self._agreement.receive_heads(deadline)[layout.topology.host_of[root]].address
                if not is_root and size:
                    ctypes.memmove(data.data_ptr(), came_to, size)
            self._agreement.broadcast_from_leader(ctx, deadline, data.data_ptr(), size)
            if not is_root:
                write_back(tensor, data)

    def all_gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, call: CollectiveCall, sizes: Sequence[int], ctx: CallContext
    ) -> None:
        """Write rank r's `tensor` to outputs[r]; a single output gets all tensors, one after the other."""
        ends = [0, *itertools.accumulate(sizes)]
        with self._session.running(call, ctx) as deadline:
            mine = dense(tensor)
            is_one = len(outputs) == 1 and is_plain(outputs[0])
            whole = outputs[0] if is_one else torch.empty(ends[-1], dtype=torch.uint8, device="cpu")
            self.gather_bytes((mine.data_ptr(), nbytes(mine)), whole, sizes, ctx, deadline)
            if not is_one:
                for r, output in enumerate(outputs):
                    part = whole[ends[r] : ends[r + 1]] if len(outputs) > 1 else whole
                    write_back(output, _typed(part, output))

    def gather_bytes(
        self, mine: Piece, whole: Tensor, sizes: Sequence[int], ctx: CallContext, deadline: Deadline
    ) -> None:
        """Write all ranks' pieces to `whole`, one after the other; the piece of rank r has sizes[r] bytes."""
        layout = self._layout
        ends = [0, *itertools.accumulate(sizes)]
        parts = self._agreement.gather_to_leader(ctx, deadline, mine, [sizes[r] for r in layout.local_ranks])
        if self._session.leaders is not None:
            pieces = [(at, sizes[r]) for at, r in zip(parts, layout.local_ranks, strict=True)]
            self._agreement.send_heads(dict.fromkeys(range(layout.num_hosts), pieces))
            came = self._agreement.receive_heads(deadline)
            for host, ranks in enumerate(layout.topology.hosts):
                source = came[host].address if host in came else 0
                for i, r in enumerate(ranks):
                    into = whole.data_ptr() + ends[r]
                    if sizes[r]:
                        ctypes.memmove(into, source if host in came else parts[i], sizes[r])
                    source += sizes[r]
        self._agreement.broadcast_from_leader(ctx, deadline, whole.data_ptr(), ends[-1])

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], call: CollectiveCall, redop: int, ctx: CallContext
    ) -> None:
        layout = self._layout
        by_host = layout.by_host
        with self._session.running(call, ctx) as deadline:
            source = torch.cat([sum_type(dense(inputs[r]), redop).view(-1) for r in by_host])
            item = source.element_size()
            counts = [inputs[r].numel() for r in by_host]
            ends = [0, *itertools.accumulate(counts)]
            first = [by_host.index(ranks[0]) for ranks in layout.topology.hosts]
            bounds = [(ends[i], ends[i + len(r)]) for i, r in zip(first, layout.topology.hosts, strict=True)]
            begin, end = bounds[layout.host]
            total = source[begin:end]
            parts = self._agreement.gather_to_leader(ctx, deadline, (source.data_ptr(), nbytes(source)), nbytes(source))
            leaders = self._session.leaders
            if leaders is not None:
                code, op, at = dtype_of(source.dtype).code, sum_of(redop), source.data_ptr()
                _core.reduce(at, tuple(parts), len(source), code, op)
                if leaders.is_direct:
                    pieces = {h: ((at + a * item, (b - a) * item),) for h, (a, b) in enumerate(bounds)}
                    skipped = 0
                else:
                    pieces = dict.fromkeys(leaders.hosts, ((at, nbytes(source)),))
                    skipped = begin * item
                self._agreement.send_heads(pieces)
                came = self._agreement.receive_heads(deadline)
                at += begin * item
                hosts = tuple([came[h].address + skipped if h in came else at for h in range(layout.num_hosts)])
                _core.reduce(at, hosts, len(total), code, op)
                divide(total, redop, self._world_size)
            self._agreement.broadcast_from_leader(ctx, deadline, total.data_ptr(), nbytes(total))
            place = first[layout.host] + layout.local_rank
            write_back(output, total[ends[place] - begin : ends[place + 1] - begin].view(output.shape))


def _typed(data: Tensor, like: Tensor) -> Tensor:
    if not data.numel():
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    if data.storage_offset() % like.element_size():
        data = data.clone()
    return data.view(like.dtype).view(like.shape)
