"""The collectives between hosts: in memory, on the rails, in memory again.

    host A: ranks 0 1                  host B: ranks 2 3
    1  reduce-scatter in memory        0: A's sum of slice 0   1: A's sum of slice 1   (the same on B)
    2  all_reduce on each rail         0 <-> 2 on slice 0      1 <-> 3 on slice 1
    3  gather in memory                every rank has every slice

Bytes that leave a host, for H hosts and a tensor of S bytes: all_reduce 2S(H-1)/H, however many ranks a host has;
all_gather and reduce_scatter S(H-1)/H of the whole; broadcast S or less. A rank that drives no rail (its host has
more ranks than the smallest) takes part in 1 and 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx import _core
from phalanx.collectives.schedule import Operation, Schedule, chunk_bounds
from phalanx.deadline import Deadline
from phalanx.diagnostics.failure_report import RankCall
from phalanx.dtypes import dtype_of
from phalanx.symmetric_memory.memory import timeout_ns
from phalanx.transport.call import PAYLOAD_BYTES, Call
from phalanx.transport.hierarchical.failure_reports import Disagreement
from phalanx.transport.hierarchical.rails import Message, data_tag, plan, talking_to
from phalanx.transport.hierarchical.segments import Turns
from phalanx.transport.hierarchical.session import Session
from phalanx.transport.shared_memory import CallContext, dense, is_plain, nbytes, scaled, write_back

_SUM, _AVG = 0, 1  # enum plx_redop
_HALF = (torch.float16, torch.bfloat16)


class Collectives(Session):
    """Every collective of `SharedMemory`, with the same arguments; see there for what each does."""

    @property
    def _data(self) -> int:
        """The tag of what the operation under way sends, where it sends all in one stream."""
        return data_tag(self._digest, 0)

    def barrier(self, ctx: CallContext) -> None:
        """Return when every rank has come."""
        with self._collective(Call("barrier", place=self._place(ctx)), ctx) as deadline:
            self._checked(self._core.barrier(timeout_ns(deadline.left_s), ctx.site, ()))

    # -- reductions ----------------------------------------------------------------------------------------------

    def sum_in_place(self, tensor: Tensor, code: int, timeout_s: float, place: tuple[str, int]) -> None:
        """As `all_reduce` with SUM."""
        self.all_reduce(tensor, _SUM, CallContext(timeout_s, self.site(place)))

    def all_reduce(self, tensor: Tensor, redop: int, ctx: CallContext, *, root: int = -1, factor: Any = None) -> None:
        """`tensor` becomes the reduction over ranks, everywhere or on `root`; each input times `factor` first.

        Numerics: half types add up in float32 and are rounded once; AVG divides the sum once. The same bits everywhere.
        """
        tensor = tensor.detach()
        call = self._reduction("all_reduce" if root < 0 else "reduce", tensor, redop, ctx, root=root)
        wanted = root in (-1, self.rank)
        if nbytes(tensor) <= PAYLOAD_BYTES:
            with self._collective(call, ctx, payload=_as_bytes(dense(scaled(tensor, factor)))):
                if wanted:
                    write_back(tensor, self._reduce_brought(tensor, redop))
            return
        with self._collective(call, ctx, early=True) as deadline:
            source = _sum_type(dense(scaled(tensor, factor))).view(-1)
            result = tensor.view(-1) if wanted and is_plain(tensor) else torch.empty(source.shape, dtype=tensor.dtype)
            self._reduce_in_segments(source, result, redop, ctx, deadline, root=root, key=tensor.data_ptr())
            if wanted and not is_plain(tensor):
                write_back(tensor, result.view(tensor.shape))

    def _reduce_brought(self, like: Tensor, redop: int) -> Tensor:
        """The reduction of what all ranks brought with their fingerprints, in the order of the ranks."""
        result = torch.empty(like.shape, dtype=like.dtype)
        if like.numel():
            parts = [torch.frombuffer(bytearray(b), dtype=torch.uint8) for b in self._brought()]
            at = tuple(part.data_ptr() for part in parts)
            _core.reduce(result.data_ptr(), at, like.numel(), dtype_of(like.dtype).code, redop)
        return result

    def _reduce_in_segments(
        self, source: Tensor, result: Tensor, redop: int, ctx: CallContext, deadline: Deadline, *, root: int, key: int
    ) -> None:
        """`result` becomes the reduction of `source` over all ranks; see `Turns`. They may be the same tensor.

        With a `root` only on its host; elsewhere `result` is scratch.
        """
        operation: Operation = "all_reduce" if root < 0 else "reduce"
        root_host = 0 if root < 0 else self.layout.topology.host_of[root]
        slice_bytes = source.nbytes // self.layout.num_rails
        options = self._options
        schedule = plan(
            operation,
            self.layout.num_hosts,
            slice_bytes.bit_length(),
            root_host,
            options.algorithm,
            options.link,
        )
        turns = Turns.of(source.nbytes, schedule.num_steps)
        ends = turns.bounds(source.numel())
        under_way: dict[int, tuple[Tensor, Iterator[None]]] = {}
        opened = 0
        for turn in range(turns.count):
            for number in range(opened, turns.opened(turn)):
                bounds = chunk_bounds(ends[number + 1] - ends[number], self.layout.num_rails)
                under_way[number] = self._open_segment(schedule, source, bounds, number, redop, deadline, key)
            opened = max(opened, turns.opened(turn))
            if turn < turns.num_segments:
                self._reduce_segment(source[ends[turn] : ends[turn + 1]], under_way[turn][0], redop, ctx, deadline)
            if turn == turns.per_step:  # from now on other hosts' data is awaited
                self._agree()
            for number in turns.stepping(turn):
                next(under_way[number][1], None)  # waits for its last step, and starts the next
            if (done := turns.finishing(turn)) is not None:
                mine, _ = under_way.pop(done)
                if root >= 0 and self.layout.host != root_host:
                    continue
                self._finish_segment(mine, result[ends[done] : ends[done + 1]], redop, ctx, deadline)

    def _open_segment(
        self,
        schedule: Schedule,
        source: Tensor,
        bounds: Sequence[int],
        number: int,
        redop: int,
        deadline: Deadline,
        key: int,
    ) -> tuple[Tensor, Iterator[None]]:
        """Where this rank's slice of the segment is added up, and what it does on the rails; receives are posted."""
        if self._rail is None:
            return source[:0], itertools.repeat(None)
        i = self.layout.local_rank
        mine = torch.empty(bounds[i + 1] - bounds[i], dtype=source.dtype)
        tag = data_tag(self._digest, number)
        steps = self._rail.play(schedule, mine, deadline, tag=tag, redop=_sum_of(redop), key=key + number)
        next(steps)
        return mine, steps

    def _reduce_segment(self, segment: Tensor, mine: Tensor, redop: int, ctx: CallContext, deadline: Deadline) -> None:
        """`mine` becomes this host's reduction of this rank's slice of `segment`."""
        if len(self.layout.local_ranks) == 1:
            mine.copy_(segment)
            return
        bounds = chunk_bounds(segment.numel(), self.layout.num_rails)
        self._reduce_here([segment[a:b] for a, b in itertools.pairwise(bounds)], mine, redop, ctx, deadline)

    def _finish_segment(self, mine: Tensor, result: Tensor, redop: int, ctx: CallContext, deadline: Deadline) -> None:
        """Every rank of the host gets every slice from the rank that drives its rail."""
        self._divide(mine, redop)
        mine = mine.to(result.dtype)
        if len(self.layout.local_ranks) == 1:
            result.copy_(mine)
        else:
            self._gather_slices(mine, result, chunk_bounds(len(result), self.layout.num_rails), ctx, deadline)

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """`output` becomes the reduction over ranks of inputs[rank]; the inputs may differ in size."""
        self._reduce_scatter(output, [scaled(t.detach(), factor) for t in inputs], redop, ctx)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, redop: int, ctx: CallContext, *, factor: Any = None
    ) -> None:
        """`output` becomes the reduction over ranks of the rank's part of `tensor`, split in equal parts."""
        flat = dense(scaled(tensor.detach(), factor)).view(-1)
        self._reduce_scatter(output, list(torch.split(flat, [output.numel()] * self.world_size)), redop, ctx)

    def _reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], redop: int, ctx: CallContext) -> None:
        output = output.detach()
        counts = tuple(t.numel() for t in inputs)
        call = self._reduction("reduce_scatter", output, redop, ctx, count=sum(counts), sizes=counts)
        hosts, here = self.layout.topology.hosts, self.layout.host
        with self._collective(call, ctx) as deadline:
            # Rail by rail, and within a rail host by host: what a rail carries lies in one piece, in the order of the
            # chunks of its schedule.
            blocks = [torch.cat([_sum_type(dense(inputs[r])).view(-1) for r in ranks]) for ranks in hosts]
            cuts = [chunk_bounds(len(block), self.layout.num_rails) for block in blocks]
            rails = [
                torch.cat([block[cut[i] : cut[i + 1]] for block, cut in zip(blocks, cuts, strict=True)])
                for i in range(self.layout.num_rails)
            ]
            i = self.layout.local_rank
            mine = rails[i] if self._rail is not None else blocks[0][:0]
            self._reduce_here(rails, mine, redop, ctx, deadline)
            part = mine
            if self._rail is not None:
                bounds = _ends([cut[i + 1] - cut[i] for cut in cuts])
                if len(mine):
                    self._rail.run(
                        "reduce_scatter", mine, deadline, tag=self._data, redop=_sum_of(redop), bounds=bounds
                    )
                part = mine[bounds[here] : bounds[here + 1]]
                self._divide(part, redop)
            block, cut = blocks[here], cuts[here]
            self._slice(block, cut).copy_(part)
            self._gather_slices(part, block, cut, ctx, deadline)
            sizes = [counts[r] for r in hosts[here]]
            write_back(output, torch.split(block, sizes)[i].view(output.shape))

    def _reduction(
        self,
        name: str,
        tensor: Tensor,
        redop: int,
        ctx: CallContext,
        *,
        root: int = -1,
        count: int | None = None,
        sizes: tuple[int, ...] = (),
    ) -> Call:
        count = tensor.numel() if count is None else count
        code = dtype_of(tensor.dtype).code
        return Call(name, code, redop, root, count, sizes, tuple(tensor.shape), self._place(ctx))

    def _reduce_here(
        self, rails: Sequence[Tensor], mine: Tensor, redop: int, ctx: CallContext, deadline: Deadline
    ) -> None:
        """`mine` becomes this host's reduction of rails[i], on the ranks that drive one; it may be rails[i]."""
        local_size = len(self.layout.local_ranks)
        if local_size == 1:
            return
        rest = [mine[:0]] * (local_size - len(rails))
        parts = [*rails, *rest]
        self._checked(
            self._core.reduce_scatter(
                tuple(part.data_ptr() for part in parts),
                tuple(part.numel() for part in parts),
                mine.data_ptr(),
                dtype_of(mine.dtype).code,
                _sum_of(redop),
                timeout_ns(deadline.left_s),
                ctx.site,
                mine.shape,
            )
        )

    def _divide(self, mine: Tensor, redop: int) -> None:
        if redop == _AVG:
            exact = mine.is_floating_point() or mine.is_complex()
            mine.div_(self.world_size, rounding_mode=None if exact else "trunc")

    # -- slices of one tensor ------------------------------------------------------------------------------------

    def _slice(self, flat: Tensor, bounds: Sequence[int]) -> Tensor:
        """The slice of this rank's rail; empty without one."""
        i = self.layout.local_rank
        return flat[bounds[i] : bounds[i + 1]] if self._rail is not None else flat[:0]

    def _gather_slices(
        self, mine: Tensor, flat: Tensor, bounds: Sequence[int], ctx: CallContext, deadline: Deadline
    ) -> None:
        """`flat` becomes, slice by slice, what the ranks that drive the rails bring as `mine`, on every rank."""
        local_size = len(self.layout.local_ranks)
        if local_size == 1:
            return
        parts = [flat[a:b] for a, b in itertools.pairwise(bounds)]
        parts += [flat[:0]] * (local_size - len(parts))
        self._gather_here(mine, parts, ctx, deadline, dtype_of(flat.dtype).code)

    # -- moves ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, root: int, ctx: CallContext) -> None:
        """`tensor` becomes root's."""
        tensor = tensor.detach()
        data = dense(tensor)
        layout = self.layout
        root_host = layout.topology.host_of[root]
        call = self._move("broadcast", data, ctx, root=root)
        if nbytes(data) <= PAYLOAD_BYTES:
            with self._collective(call, ctx, payload=_as_bytes(data)):
                if root != self.rank:
                    write_back(tensor, _like(data, self._brought()[root]))
            return
        with self._collective(call, ctx) as deadline:
            flat = _bytes(data)
            bounds = chunk_bounds(len(flat), layout.num_rails)
            if layout.host == root_host:
                self._broadcast_here(flat, layout.local_ranks.index(root), ctx, deadline)
            mine = self._slice(flat, bounds)
            if self._rail is not None and len(mine):
                self._rail.run("broadcast", mine, deadline, tag=self._data, root=root_host)
            if layout.host != root_host:
                self._gather_slices(mine, flat, bounds, ctx, deadline)
            if data is not tensor and root != self.rank:
                write_back(tensor, data)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, ctx: CallContext, *, root: int = -1) -> None:
        """outputs[r] becomes rank r's `tensor`, everywhere or on `root`; elsewhere `outputs` is empty."""
        tensor, outputs = tensor.detach(), [t.detach() for t in outputs]
        if root >= 0:
            self._gather_to(outputs, tensor, root, ctx)
            return
        sizes = tuple(nbytes(t) for t in outputs)
        data = dense(tensor)
        call = self._move("all_gather", tensor, ctx, count=sum(sizes), sizes=sizes)
        if max(sizes) <= PAYLOAD_BYTES:
            with self._collective(call, ctx, payload=_as_bytes(data)):
                for output, came in zip(outputs, self._brought(), strict=True):
                    write_back(output, _like(output, came))
            return
        with self._collective(call, ctx) as deadline:
            parts = self._all_gather(_bytes(data), sizes, ctx, deadline)
            for output, part in zip(outputs, parts, strict=True):
                write_back(output, part.view(output.dtype).view(output.shape))

    def all_gather_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """`output`, split in world_size equal parts, becomes all ranks' `tensor`s."""
        output, data = output.detach(), dense(tensor.detach())
        sizes = (nbytes(data),) * self.world_size
        call = self._move("all_gather", data, ctx)
        if nbytes(data) <= PAYLOAD_BYTES:
            with self._collective(call, ctx, payload=_as_bytes(data)):
                parts = [_like(data, came).view(-1) for came in self._brought()]
                write_back(output, torch.cat(parts).view(output.shape))
            return
        with self._collective(call, ctx) as deadline:
            parts = self._all_gather(_bytes(data), sizes, ctx, deadline)
            write_back(output, torch.cat(parts).view(output.dtype).view(output.shape))

    def _all_gather(self, mine: Tensor, sizes: Sequence[int], ctx: CallContext, deadline: Deadline) -> list[Tensor]:
        """Every rank's bytes, by rank: gathered on each host, each rail carrying its slice of the hosts' blocks."""
        layout, here = self.layout, self.layout.host
        hosts = layout.topology.hosts
        blocks = [torch.empty(sum(sizes[r] for r in ranks), dtype=torch.uint8) for ranks in hosts]
        ours = torch.split(blocks[here], [sizes[r] for r in hosts[here]])
        self._gather_here(mine, ours, ctx, deadline)
        cuts = [chunk_bounds(len(block), layout.num_rails) for block in blocks]
        rails = [
            torch.empty(sum(cut[i + 1] - cut[i] for cut in cuts), dtype=torch.uint8) for i in range(layout.num_rails)
        ]
        if self._rail is not None:
            i = layout.local_rank
            bounds = _ends([cut[i + 1] - cut[i] for cut in cuts])
            rails[i][bounds[here] : bounds[here + 1]].copy_(self._slice(blocks[here], cuts[here]))
            if len(rails[i]):
                self._rail.run("all_gather", rails[i], deadline, tag=self._data, bounds=bounds)
        if len(hosts[here]) > 1:
            empty = torch.empty(0, dtype=torch.uint8)
            driven = rails[layout.local_rank] if self._rail is not None else empty
            self._gather_here(driven, [*rails, *[empty] * (len(hosts[here]) - len(rails))], ctx, deadline)
        for i, rail in enumerate(rails):
            pieces = torch.split(rail, [cut[i + 1] - cut[i] for cut in cuts])
            for block, cut, piece in zip(blocks, cuts, pieces, strict=True):
                block[cut[i] : cut[i + 1]].copy_(piece)
        by_rank: list[Tensor] = [mine] * self.world_size
        for block, ranks in zip(blocks, hosts, strict=True):
            for r, part in zip(ranks, torch.split(block, [sizes[r] for r in ranks]), strict=True):
                by_rank[r] = part
        return by_rank

    # -- moves that go straight from rank to rank ----------------------------------------------------------------
    # A byte has one destination, so it crosses one edge once whoever carries it: between hosts each rank sends its own,
    # and inside them they go through memory meanwhile.

    def _gather_to(self, outputs: Sequence[Tensor], tensor: Tensor, root: int, ctx: CallContext) -> None:
        data, parts = dense(tensor), [dense(t) for t in outputs]
        everybody, local = range(self.world_size), self.layout.local_ranks
        with self._collective(self._move("gather", data, ctx, root=root), ctx) as deadline:
            to_root = [data if r == root else None for r in everybody]
            messages = self._swap(to_root, parts or [None] * self.world_size, deadline)
            if root in local:
                at = tuple(parts[r].data_ptr() for r in local) if parts else None
                sizes, local_root = (nbytes(data),) * len(local), local.index(root)
                left = timeout_ns(deadline.left_s)
                self._checked(self._core.gather(data.data_ptr(), at, sizes, 0, local_root, left, ctx.site, data.shape))
            _wait_all(messages)
            _write_all(outputs, parts)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, ctx: CallContext) -> None:
        """`output` becomes root's inputs[rank]; elsewhere `inputs` is empty."""
        output, parts = output.detach(), [dense(t.detach()) for t in inputs]
        data = dense(output)
        everybody, local = range(self.world_size), self.layout.local_ranks
        with self._collective(self._move("scatter", data, ctx, root=root), ctx) as deadline:
            from_root = [data if r == root else None for r in everybody]
            messages = self._swap(parts or [None] * self.world_size, from_root, deadline)
            if root in local:
                at = tuple(parts[r].data_ptr() for r in local) if parts else None
                local_root, left = local.index(root), timeout_ns(deadline.left_s)
                self._checked(
                    self._core.scatter(at, data.data_ptr(), nbytes(data), 0, local_root, left, ctx.site, data.shape)
                )
            _wait_all(messages)
            if data is not output:
                write_back(output, data)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], ctx: CallContext, *, splits: bool
    ) -> None:
        """outputs[r] becomes rank r's inputs[rank]. `splits`: sizes may differ, and are compared across ranks."""
        outputs, src = [t.detach() for t in outputs], [dense(t.detach()) for t in inputs]
        dst = [dense(t) for t in outputs]
        # Whether there are splits may differ from rank to rank, as on one host; the sizes themselves are compared.
        call = Call("all_to_all", dtype_of(src[0].dtype).code, shape=tuple(src[0].shape), place=self._place(ctx))
        sent, awaited = [nbytes(t) for t in src], [nbytes(t) for t in dst]
        table = _as_bytes(torch.tensor([sent, awaited]))
        fits = len(table) <= PAYLOAD_BYTES
        with self._collective(call, ctx, payload=table if fits else None) as deadline:
            if fits:
                tables = [
                    torch.frombuffer(bytearray(came[: len(table)]), dtype=torch.int64) for came in self._brought()
                ]
            else:
                mine, sizes = torch.frombuffer(bytearray(table), dtype=torch.uint8), (len(table),) * self.world_size
                tables = [came.view(torch.int64) for came in self._all_gather(mine, sizes, ctx, deadline)]
            _compare_sizes([came.view(2, -1).tolist() for came in tables])
            messages = self._swap(src, dst, deadline)
            local = self.layout.local_ranks
            if len(local) > 1:
                self._checked(
                    self._core.all_to_all(
                        tuple(src[r].data_ptr() for r in local),
                        tuple(sent[r] for r in local),
                        tuple(dst[r].data_ptr() for r in local),
                        tuple(awaited[r] for r in local),
                        0,
                        1,
                        timeout_ns(deadline.left_s),
                        ctx.site,
                        src[0].shape,
                    )
                )
            else:
                dst[self.rank].copy_(src[self.rank].view(dst[self.rank].shape))
            _wait_all(messages)
            _write_all(outputs, dst)

    def all_to_all_single(self, output: Tensor, tensor: Tensor, ctx: CallContext) -> None:
        """As `all_to_all` with the equal parts of two contiguous tensors."""
        parts = [list(t.detach().view(-1).chunk(self.world_size)) for t in (output, tensor)]
        if tensor.numel() == 0:
            parts = [[t.detach()] * self.world_size for t in (output, tensor)]
        self.all_to_all(parts[0], parts[1], ctx, splits=False)

    def _swap(
        self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], deadline: Deadline
    ) -> list[Message]:
        """Start to send sends[r] to and receive receives[r] from each rank r of other hosts; None is skipped."""
        messages = []
        # Receives first: see `phalanx.collectives.execute`.
        for start, tensors in ((self._engine.recv, receives), (self._engine.send, sends)):
            for r, tensor in enumerate(tensors):
                if r not in self.layout.local_ranks and tensor is not None and tensor.numel():
                    with talking_to(r):
                        messages.append(Message(start(r, tensor, self._data), r, deadline))
        return messages

    def _move(
        self,
        name: str,
        tensor: Tensor,
        ctx: CallContext,
        *,
        root: int = -1,
        count: int | None = None,
        sizes: tuple[int, ...] = (),
    ) -> Call:
        return self._reduction(name, tensor, -1, ctx, root=root, count=count, sizes=sizes)


def _sum_of(redop: int) -> int:
    """The mean is a sum until it is divided, once, at the end."""
    return _SUM if redop == _AVG else redop


def _sum_type(tensor: Tensor) -> Tensor:
    """`tensor` in the type in which it is added up."""
    return tensor.float() if tensor.dtype in _HALF else tensor


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, in place."""
    return tensor.view(-1).view(torch.uint8)


def _as_bytes(tensor: Tensor) -> bytes:
    """A copy of the bytes of a small contiguous tensor."""
    return bytes(_bytes(tensor).tolist())


def _like(tensor: Tensor, data: bytes) -> Tensor:
    """What `data` begins with, as a tensor like `tensor`."""
    size = nbytes(tensor)
    if size == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.frombuffer(bytearray(data[:size]), dtype=tensor.dtype).view(tensor.shape)


def _compare_sizes(sizes: Sequence[Sequence[Sequence[int]]]) -> None:
    """sizes[r] is what rank r sends to whom, and what it awaits from whom, in bytes; every pair must fit.

    Raises:
        Disagreement: some do not; all ranks find the same.
    """
    calls: dict[int, str] = {}
    for r, (sent, _) in enumerate(sizes):
        for peer, (_, awaited) in enumerate(sizes):
            if sent[peer] != awaited[r]:
                calls.setdefault(r, f"all_to_all that sends {sent[peer]} bytes to rank {peer}")
                calls.setdefault(peer, f"all_to_all that awaits {awaited[r]} bytes from rank {r}")
    if calls:
        raise Disagreement({rank: RankCall(text) for rank, text in calls.items()}, complete=True)


def _wait_all(messages: Sequence[Message]) -> None:
    for message in messages:
        message.wait()


def _ends(sizes: Sequence[int]) -> list[int]:
    """Where pieces of these sizes begin and end, one after the other."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return ends


def _write_all(tensors: Sequence[Tensor], data: Sequence[Tensor]) -> None:
    for tensor, got in zip(tensors, data, strict=True):
        if got is not tensor:
            write_back(tensor, got)
