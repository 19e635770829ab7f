"""Run collectives of large tensors in segments, each in shared memory, then over the rails, then in memory again.

    host A: ranks 0 1                  host B: ranks 2 3
    1  reduce-scatter in memory        0: A's sum of slice 0   1: A's sum of slice 1   (the same on B)
    2  all_reduce on each rail         0 <-> 2 on slice 0      1 <-> 3 on slice 1
    3  gather in memory                every rank has every slice

These are the steps of all_reduce. In broadcast and all_gather, step 1 copies inside a host instead of reducing;
reduce_scatter has no step 3. While some segments are on the link, a later segment is reduced in memory, and an earlier
segment is gathered: see `Ticks`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx import _core
from phalanx._base.deadline import Deadline, timeout_ns
from phalanx._base.dtypes import dtype_of
from phalanx._comm.engines.engine import PendingMessage
from phalanx._comm.schedules.schedule import Operation, Schedule, chunk_bounds
from phalanx._comm.transport.base import CallContext
from phalanx._comm.transport.call import CollectiveCall
from phalanx._comm.transport.hierarchical.agreement import Agreement
from phalanx._comm.transport.hierarchical.rails import PendingSend, RailMessage, as_connection_broken, plan
from phalanx._comm.transport.numerics import divide, sum_of, sum_type
from phalanx._comm.transport.tensors import dense, is_plain, scaled, write_all_back, write_back

_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


class SegmentedCollectives:
    """`SegmentedCollectives` are the collectives of large tensors. Each takes `call` and the collective's arguments."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._session = agreement.session
        self._layout = agreement.session.layout
        self._rank = agreement.session.rank
        self._world_size = agreement.session.world_size

    def all_reduce(
        self, tensor: Tensor, call: CollectiveCall, redop: int, ctx: CallContext, *, root: int, factor: Any
    ) -> None:
        wanted = root in (-1, self._rank)
        with self._session.running(call, ctx) as deadline:
            self._agreement.gather_to_leader(ctx, deadline)
            self._agreement.send_heads()
            source = sum_type(dense(scaled(tensor, factor)), redop).view(-1)
            in_place = wanted and is_plain(tensor)
            result = tensor.view(-1) if in_place else torch.empty(source.shape, dtype=tensor.dtype, device="cpu")
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
        self, output: Tensor, inputs: Sequence[Tensor], call: CollectiveCall, redop: int, ctx: CallContext, factor: Any
    ) -> None:
        with self._session.running(call, ctx) as deadline:
            self._agreement.agree(ctx, deadline)
            sources = [sum_type(dense(scaled(t, factor)), redop).view(-1) for t in inputs]
            in_place = is_plain(output) and output.dtype == sources[0].dtype
            result = output.view(-1) if in_place else torch.empty(output.numel(), dtype=sources[0].dtype, device="cpu")
            self._reduce_scatter_in_segments(result, sources, redop, ctx, deadline)
            if not in_place:
                write_back(output, result.view(output.shape))

    def broadcast(self, tensor: Tensor, call: CollectiveCall, root: int, ctx: CallContext) -> None:
        with self._session.running(call, ctx) as deadline:
            self._agreement.agree(ctx, deadline)
            data = dense(tensor)
            self._broadcast_in_segments(data.view(-1).view(torch.uint8), root, ctx, deadline)
            if root != self._rank:
                write_back(tensor, data)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, call: CollectiveCall, ctx: CallContext) -> None:
        with self._session.running(call, ctx) as deadline:
            self._agreement.agree(ctx, deadline)
            into = [t if is_plain(t) else torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in outputs]
            flat = [t.view(-1).view(torch.uint8) for t in into]
            self.all_gather_bytes(dense(tensor).view(-1).view(torch.uint8), flat, ctx, deadline)
            write_all_back(outputs, into)

    # -- between the agreement and the end: tensors are flat and plain -------------------------------------------

    def _reduce_in_segments(
        self,
        source: Tensor,
        result: Tensor,
        redop: int,
        ctx: CallContext,
        deadline: Deadline,
        *,
        root: int,
        key: int,
        is_scratch: bool,
    ) -> None:
        """Write the reduction of `source` over all ranks to `result`, which may be the same tensor.

        With a `root`, only the root's host gets the result; elsewhere `result` is scratch. `source` may be overwritten
        if it is `result`, or if `is_scratch`. The hosts agree before this rank writes to `source` or `result`.
        """
        layout = self._layout
        # A rank that is alone on its host reduces in place, unless sums are rounded: rounding writes to the buffer
        # before all hosts have agreed.
        in_place = len(layout.local_ranks) == 1 and not self._session.compression.rounds(source.dtype, redop)
        in_place = in_place and (is_scratch or source.data_ptr() == result.data_ptr())
        root_host = 0 if root < 0 else layout.topology.host_of[root]
        schedule = self._plan("all_reduce" if root < 0 else "reduce", source.nbytes // layout.num_rails, root_host)
        ticks = Ticks.of(source.nbytes, schedule.num_steps, layout.num_hosts)
        ends = ticks.bounds(source.numel())

        def open_(number: int) -> tuple[Tensor, Iterator[None]]:
            if self._session.rail is None:
                return source[:0], itertools.repeat(None)
            bounds = chunk_bounds(ends[number + 1] - ends[number], layout.num_rails)
            if in_place:
                mine = source[ends[number] : ends[number + 1]]
            else:
                mine = torch.empty(
                    bounds[layout.local_rank + 1] - bounds[layout.local_rank], dtype=source.dtype, device="cpu"
                )
            return self._play(schedule, mine, number, deadline, redop=sum_of(redop), key=key + number)

        def start(number: int, mine: Tensor) -> None:
            if not in_place:
                self._reduce_segment(source[ends[number] : ends[number + 1]], mine, redop, ctx, deadline)

        def finish(number: int, mine: Tensor) -> None:
            if root < 0 or layout.host == root_host:
                self._finish_segment(mine, result[ends[number] : ends[number + 1]], redop, ctx, deadline)

        self._run_ticks(ticks, open_, start, finish, before_others=lambda: self._agree_in_time(deadline))
        if in_place:
            result[:0].zero_()  # increment the tensor's version counter: the reduction wrote to raw addresses

    def _agree_in_time(self, deadline: Deadline) -> None:
        """Agree with the other hosts, before this rank waits for their data and writes to the user's tensor."""
        self._agreement.receive_heads(deadline)

    def _reduce_segment(self, segment: Tensor, mine: Tensor, redop: int, ctx: CallContext, deadline: Deadline) -> None:
        """Write this host's reduction of this rank's slice of `segment` to `mine`."""
        if len(self._layout.local_ranks) == 1:
            mine.copy_(segment)
            return
        bounds = chunk_bounds(segment.numel(), self._layout.num_rails)
        self._reduce_here([segment[a:b] for a, b in itertools.pairwise(bounds)], mine, redop, ctx, deadline)

    def _finish_segment(self, mine: Tensor, result: Tensor, redop: int, ctx: CallContext, deadline: Deadline) -> None:
        """Divide the slices if the result is a mean, and copy each slice to every rank of the host."""
        divide(mine, redop, self._world_size)
        mine = mine.to(result.dtype)
        if len(self._layout.local_ranks) == 1:
            if mine.data_ptr() != result.data_ptr():
                result.copy_(mine)
        else:
            self._gather_slices(mine, result, chunk_bounds(len(result), self._layout.num_rails), ctx, deadline)

    # -- broadcast -----------------------------------------------------------------------------------------------

    def _broadcast_in_segments(self, flat: Tensor, root: int, ctx: CallContext, deadline: Deadline) -> None:
        """Overwrite `flat` (bytes) on every rank with the root's."""
        layout = self._layout
        root_host = layout.topology.host_of[root]
        is_source = layout.host == root_host
        schedule = self._plan("broadcast", len(flat) // layout.num_rails, root_host)
        ticks = Ticks.of(len(flat), schedule.num_steps)
        ends = ticks.bounds(len(flat))
        segments = [flat[a:b] for a, b in itertools.pairwise(ends)]
        slices = [chunk_bounds(len(segment), layout.num_rails) for segment in segments]

        def open_(number: int) -> tuple[Tensor, Iterator[None]]:
            return self._play(schedule, self._slice(segments[number], slices[number]), number, deadline)

        def start(number: int, mine: Tensor) -> None:
            if is_source and len(layout.local_ranks) > 1:
                self._agreement.broadcast_here(segments[number], layout.local_ranks.index(root), ctx, deadline)

        def finish(number: int, mine: Tensor) -> None:
            if not is_source:
                self._gather_slices(mine, segments[number], slices[number], ctx, deadline)

        self._run_ticks(ticks, open_, start, finish)

    def _run_ticks(
        self,
        ticks: Ticks,
        open_: Callable[[int], tuple[Tensor, Iterator[None]]],
        start: Callable[[int, Tensor], None],
        finish: Callable[[int, Tensor], None],
        *,
        before_others: Callable[[], None] = lambda: None,
    ) -> None:
        """Open each segment (post its receives), start it, run its steps and finish it, in the order of `ticks`.

        `before_others` is called once, before this rank waits for data from another host. If leaders forward each
        other's messages, it is called before any data are sent: those messages would have to queue behind the data.
        """
        before_others_at = ticks.per_step if self._session.leaders is None or self._session.leaders.is_direct else 0
        under_way: dict[int, tuple[Tensor, Iterator[None]]] = {}
        opened = 0
        for tick in range(ticks.count):
            for number in range(opened, ticks.opened(tick)):
                under_way[number] = open_(number)
            opened = max(opened, ticks.opened(tick))
            if tick == before_others_at:
                before_others()
            if tick < ticks.num_segments:
                start(tick, under_way[tick][0])
            for number in ticks.stepping(tick):
                next(under_way[number][1], None)  # waits for the segment's previous step, and starts the next
            if (done := ticks.finishing(tick)) is not None:
                finish(done, under_way.pop(done)[0])

    def _plan(self, operation: Operation, slice_bytes: int, root_host: int = 0) -> Schedule:
        options = self._session.options
        log_bytes = slice_bytes.bit_length()
        return plan(operation, self._layout.num_hosts, log_bytes, root_host, options.algorithm, options.link)

    def _play(
        self, schedule: Schedule, mine: Tensor, number: int, deadline: Deadline, *, redop: int = -1, key: int = 0
    ) -> tuple[Tensor, Iterator[None]]:
        """Return `mine`, and an iterator that runs `schedule` on it, over this rank's rail; the receives are posted."""
        if self._session.rail is None:
            return mine, itertools.repeat(None)
        steps = self._session.rail.play(
            schedule, mine, deadline, tag=self._agreement.stream(number), redop=redop, key=key
        )
        next(steps)
        return mine, steps

    # -- all_gather and reduce_scatter -----------------------------------------------------------------------------
    # The data of a host's j-th rank travel on rail j modulo the number of rails. Every host sends its ranks' data
    # directly to all other hosts: no algorithm sends fewer bytes out of a host.

    def all_gather_bytes(self, mine: Tensor, outputs: Sequence[Tensor], ctx: CallContext, deadline: Deadline) -> None:
        """Write rank r's `mine` to outputs[r]; all are bytes. `mine` may be this rank's own output."""
        hosts, here = self._layout.topology.hosts, self._layout.host
        ticks = Ticks.of(sum(map(len, outputs)), 1, self._layout.num_hosts)
        cuts = {r: [len(output) * n // ticks.num_segments for n in range(ticks.num_segments + 1)]
                for r, output in enumerate(outputs)}  # fmt: skip

        def piece(r: int, number: int) -> Tensor:
            return outputs[r][cuts[r][number] : cuts[r][number + 1]]

        def open_(number: int) -> tuple[Tensor, Iterator[None]]:
            receives = [
                (hosts[h][self._layout.local_rank], piece(r, number))
                for h in self._other_hosts
                for r in self._carried(h)
            ]
            return _EMPTY, self._cross(receives, lambda: self._outgoing(piece, number), number, deadline)

        def start(number: int, _: Tensor) -> None:
            own = mine[cuts[self._rank][number] : cuts[self._rank][number + 1]]
            self._share_pieces(here, lambda _: own, piece, number, ctx, deadline, rounds=1)

        def finish(number: int, _: Tensor) -> None:
            for h in self._other_hosts:
                rounds = -(-len(hosts[h]) // self._layout.num_rails)
                self._share_pieces(h, lambda r: piece(r, number), piece, number, ctx, deadline, rounds=rounds)

        self._run_ticks(ticks, open_, start, finish)

    @property
    def _other_hosts(self) -> list[int]:
        return [h for h in range(self._layout.num_hosts) if h != self._layout.host]

    def _carried(self, host: int) -> Sequence[int]:
        """Return the ranks of `host` whose data travel on this rank's rail; none if this rank has no rail."""
        if self._session.rail is None:
            return ()
        return self._layout.topology.hosts[host][self._layout.local_rank :: self._layout.num_rails]

    def _outgoing(self, piece: Callable[[int, int], Tensor], number: int) -> list[tuple[int, Tensor]]:
        """Return the messages on this rank's rail to the other hosts: the pieces of all ranks that the rail carries."""
        hosts, i = self._layout.topology.hosts, self._layout.local_rank
        carried = self._carried(self._layout.host)
        return [(hosts[h][i], piece(r, number)) for h in self._other_hosts for r in carried]

    def _cross(
        self,
        receives: Sequence[tuple[int, Tensor]],
        sends: Callable[[], Sequence[tuple[int, Tensor]]],
        number: int,
        deadline: Deadline,
    ) -> Iterator[None]:
        """Post the receives of one exchange with ranks on other hosts, and return an iterator for the rest.

        Its first step posts the sends; its second waits for all messages.
        """
        tag = self._agreement.stream(number)
        messages = [
            self._post(self._session.engine.recv, peer, tensor, tag, deadline)
            for peer, tensor in receives
            if len(tensor)
        ]

        def steps() -> Iterator[None]:
            out = [
                self._post(self._session.engine.send, peer, tensor, tag, deadline)
                for peer, tensor in sends()
                if len(tensor)
            ]
            yield
            for message in (*out, *messages):
                message.wait()

        return steps()

    def _share_pieces(
        self,
        host: int,
        mine: Callable[[int], Tensor],
        piece: Callable[[int, int], Tensor],
        number: int,
        ctx: CallContext,
        deadline: Deadline,
        *,
        rounds: int,
    ) -> None:
        """Copy the pieces of `host`'s ranks from the local ranks that hold them to every rank of this host."""
        local_size, width = len(self._layout.local_ranks), self._layout.num_rails
        ranks = self._layout.topology.hosts[host]
        if host == self._layout.host:
            width = local_size
        for n in range(rounds):
            of_round = ranks[n * width : (n + 1) * width]
            i = self._layout.local_rank
            source = mine(of_round[i]) if i < len(of_round) else _EMPTY
            if local_size == 1:
                into = piece(of_round[0], number)
                if into.data_ptr() != source.data_ptr():
                    into.copy_(source)
                continue
            parts = [piece(r, number) for r in of_round]
            self._agreement.gather_here(source, [*parts, *[_EMPTY] * (local_size - len(parts))], ctx, deadline)

    def _reduce_scatter_in_segments(
        self, output: Tensor, inputs: Sequence[Tensor], redop: int, ctx: CallContext, deadline: Deadline
    ) -> None:
        """Write the reduction over ranks of inputs[rank] to `output`, in host order; both have the type for sums."""
        layout, rank = self._layout, self._rank
        hosts, i = layout.topology.hosts, layout.local_rank
        item = output.element_size()
        ticks = Ticks.of(sum(map(len, inputs)) * item, 1, layout.num_hosts)
        cuts = {r: [len(part) * n // ticks.num_segments for n in range(ticks.num_segments + 1)]
                for r, part in enumerate(inputs)}  # fmt: skip
        partial: dict[tuple[int, int], Tensor] = {}  # by segment and destination rank
        arrived: dict[tuple[int, int], Tensor] = {}  # by segment and source host

        def size(r: int, number: int) -> int:
            return cuts[r][number + 1] - cuts[r][number]

        def open_(number: int) -> tuple[Tensor, Iterator[None]]:
            receives = []
            for h in self._other_hosts:
                arrived[number, h] = torch.empty(size(rank, number), dtype=output.dtype, device="cpu")
                receives.append((hosts[h][i % layout.num_rails], arrived[number, h]))
            return _EMPTY, self._cross_sums(receives, lambda: outgoing(number), number, deadline, redop)

        def outgoing(number: int) -> list[tuple[int, Tensor]]:
            return [(r, partial.pop((number, r))) for h in self._other_hosts for r in self._carried(h)]

        def start(number: int, _: Tensor) -> None:
            for h, ranks in enumerate(hosts):
                width = len(ranks) if h == layout.host else layout.num_rails
                for first in range(0, len(ranks), width):
                    of_round = ranks[first : first + width]
                    pieces = [inputs[r][cuts[r][number] : cuts[r][number + 1]] for r in of_round]
                    if i < len(of_round):
                        into = torch.empty(size(of_round[i], number), dtype=output.dtype, device="cpu")
                        partial[number, of_round[i]] = into
                    else:
                        into = output[:0]
                    if len(layout.local_ranks) == 1:
                        into.copy_(pieces[0])
                    else:
                        self._reduce_here(pieces, into, redop, ctx, deadline)

        def finish(number: int, _: Tensor) -> None:
            own = partial.pop((number, rank))
            parts = [own if h == layout.host else arrived.pop((number, h)) for h in range(layout.num_hosts)]
            into = output[cuts[rank][number] : cuts[rank][number + 1]]
            if len(into):
                at = tuple(part.data_ptr() for part in parts)
                _core.reduce(into.data_ptr(), at, len(into), dtype_of(into.dtype).code, sum_of(redop))
                divide(into, redop, self._world_size)

        self._run_ticks(ticks, open_, start, finish)

    def _cross_sums(
        self,
        receives: Sequence[tuple[int, Tensor]],
        sends: Callable[[], Sequence[tuple[int, Tensor]]],
        number: int,
        deadline: Deadline,
        redop: int,
    ) -> Iterator[None]:
        """Exchange partial results as `_cross` does; sums may be rounded for sending."""
        if not receives or not self._session.compression.rounds(receives[0][1].dtype, redop):
            return self._cross(receives, sends, number, deadline)
        short = [(peer, self._session.compression.staging(tensor)) for peer, tensor in receives]
        steps = self._cross(
            short,
            lambda: [(peer, self._session.compression.shorten(tensor, None)) for peer, tensor in sends()],
            number,
            deadline,
        )

        def widened() -> Iterator[None]:
            next(steps)
            yield
            next(steps, None)
            for (_, tensor), (_, came) in zip(receives, short, strict=True):
                tensor.copy_(came)

        return widened()

    def _post(
        self,
        begin: Callable[[int, Tensor, int], PendingMessage],
        peer: int,
        tensor: Tensor,
        tag: int,
        deadline: Deadline,
    ) -> RailMessage:
        with as_connection_broken(peer):
            return RailMessage(PendingSend(begin(peer, tensor, tag), tensor), peer, deadline)

    def _reduce_here(
        self, rails: Sequence[Tensor], mine: Tensor, redop: int, ctx: CallContext, deadline: Deadline
    ) -> None:
        """Write this host's reduction of rails[i] to the `mine` of local rank i; `mine` may be rails[i].

        A rank beyond the last of `rails` passes an empty `mine`.
        """
        local_size = len(self._layout.local_ranks)
        if local_size == 1:
            return
        rest = [mine[:0]] * (local_size - len(rails))
        parts = [*rails, *rest]
        self._agreement.check(
            self._session.core.reduce_scatter(
                tuple(part.data_ptr() for part in parts),
                tuple(part.numel() for part in parts),
                mine.data_ptr(),
                dtype_of(mine.dtype).code,
                sum_of(redop),
                timeout_ns(deadline.left_s),
                ctx.call_site,
                mine.shape,
            )
        )

    # -- slices of one tensor ------------------------------------------------------------------------------------

    def _slice(self, flat: Tensor, bounds: Sequence[int]) -> Tensor:
        """Return the slice for this rank's rail; it is empty if this rank has no rail."""
        i = self._layout.local_rank
        return flat[bounds[i] : bounds[i + 1]] if self._session.rail is not None else flat[:0]

    def _gather_slices(
        self, mine: Tensor, flat: Tensor, bounds: Sequence[int], ctx: CallContext, deadline: Deadline
    ) -> None:
        """Write each local rank's `mine` to its rail's slice of `flat`, on every rank of the host."""
        local_size = len(self._layout.local_ranks)
        if local_size == 1:
            return
        parts = [flat[a:b] for a, b in itertools.pairwise(bounds)]
        parts += [flat[:0]] * (local_size - len(parts))
        self._agreement.gather_here(mine, parts, ctx, deadline, dtype_of(flat.dtype).code)


# Each segment costs two syncs in memory and, per step, a message on each rail. More than four segments cost more CPU
# time than the better overlap saves, unless the segments would be very large.
_WANTED = 4
_LEAST_BYTES, _MOST_BYTES = 2**21, 2**23
_LEAST_MESSAGE_BYTES = 2**18  # with many hosts: each segment is cut again, into one message for each host
# Segments in flight at once: while they keep the link busy, a rank that is a little late delays nothing.
_UNDER_WAY = 6


@dataclass(frozen=True)
class Ticks:
    """`Ticks` order the work on segments alike on all ranks, even those without a rail, so that waits form no cycle.

        tick 0   post the receives of segments 0 to `depth`; reduce segment 0 in memory, start its first step
        tick 1   post the receives of the next segment; reduce segment 1, start its first step
        ...      every segment begins its next step `per_step` ticks after the last one
        tick d   segment 0 has done all its steps: it is gathered in memory while others are on the link   (d = `depth`)

    Receives are posted this early because the receiver must first notify the sender, and the notification queues behind
    all data that are sent in the same direction.
    """

    num_segments: int
    num_steps: int

    @classmethod
    def of(cls, nbytes: int, num_steps: int, num_messages: int = 1) -> Ticks:
        """Return the ticks for a tensor of `nbytes` on this host, with `num_steps` steps between the hosts.

        A segment is sent in `num_messages` messages, one after the other or each to a different host.
        """
        least = max(_LEAST_BYTES, _LEAST_MESSAGE_BYTES * num_messages)
        size = min(max(-(-nbytes // _WANTED), least), max(_MOST_BYTES, 2 * least))
        return cls(max(1, -(-nbytes // size)), num_steps)

    def bounds(self, length: int) -> list[int]:
        """Return where the segments of `length` elements begin, and `length` at the end.

        The first and the last are half as long as the others, because the link is idle while the first is reduced and
        while the last is gathered.
        """
        n = self.num_segments
        return [0, *(length * (2 * i - 1) // (2 * n - 2) for i in range(1, n)), length]

    @property
    def per_step(self) -> int:
        """Return the number of ticks from a step's start to its end."""
        return max(1, _UNDER_WAY // max(1, self.num_steps))

    @property
    def depth(self) -> int:
        """Return the number of ticks from a segment's start to its end."""
        return self.num_steps * self.per_step

    @property
    def count(self) -> int:
        return self.num_segments + self.depth

    def opened(self, tick: int) -> int:
        """Return how many segments' receives are posted when the segment of `tick` starts."""
        return min(self.num_segments, tick + self.depth + 1)

    def stepping(self, tick: int) -> list[int]:
        """Return the segments that begin a step, or end their last one, in `tick`; newest first, to send early."""
        newest, oldest = min(tick, self.num_segments - 1), max(0, tick - self.depth)
        return [s for s in range(newest, oldest - 1, -1) if (tick - s) % self.per_step == 0]

    def finishing(self, tick: int) -> int | None:
        """Return the segment that ends in `tick`, if one does."""
        return tick - self.depth if tick >= self.depth else None
