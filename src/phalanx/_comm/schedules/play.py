"""Run one rank's part of a schedule over any implementation of send and receive.

The buffer may have any type with a length whose slices are views, such as a one-dimensional NumPy array or torch
tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from phalanx._comm.schedules.schedule import RankStep, Schedule, chunk_bounds


class PendingTransfer(Protocol):
    """A `PendingTransfer` is a send or receive that has been started."""

    def wait(self) -> object:
        """Wait until the transfer is complete; raise its error if it failed."""


class Buffer(Protocol):
    """A `Buffer` is a one-dimensional sequence of elements whose slices are views."""

    def __len__(self) -> int:
        """Return the number of elements."""

    def __getitem__(self: B, part: slice, /) -> B:
        """Return a view of a slice, not a copy."""


B = TypeVar("B", bound=Buffer)


def play(
    schedule: Schedule,
    rank: int,
    buffer: B,
    *,
    send: Callable[[int, B], PendingTransfer | None],
    recv: Callable[[int, B], PendingTransfer | None],
    combine: Callable[[B, B, B], object],
    scratch: Callable[[int], B],
) -> Iterator[None]:
    """Play `rank`'s part of `schedule` on `buffer`, in place; the other ranks must play theirs.

    The iterator pauses 1 + `schedule.num_steps` times. At the first pause all receives have been started, so that no
    sender waits for this rank; `buffer` may still be written. At each later pause a step, perhaps an idle one, has been
    started. Resuming waits for the step and starts the next. Several plays may be interleaved, so that one sends while
    another computes, if all ranks interleave them in the same order and can distinguish their messages.

    `send(dst, view)` and `recv(src, view)` start a transfer and return its handle, or None if it needs no wait. Neither
    may block until the peer acts. Messages between two ranks arrive in the order in which they were sent.
    `combine(into, first, second)` combines `first`, which came from the lower rank, with `second`, and stores the
    result in `into`, which is one of the two. `scratch(n)` returns an uninitialised buffer of n elements.

    Empty chunks are not sent. Data that arrive early are stored in scratch, or overwrite a chunk whose last value has
    been sent: a reduction that arrives at a rank contains that rank's own data. Memory: scratch for all received data
    that will be combined, in all steps together. Numerics: see `Schedule.order`; bitwise identical on all ranks.

    Raises:
        Exception: any error of `send`, `recv`, `combine` or a handle; the buffer then holds undefined values.
    """
    bounds = chunk_bounds(len(buffer), schedule.num_chunks)
    steps = list(schedule.for_rank(rank))
    staging = scratch(sum(_staged(step, bounds) for step in steps))
    arrivals = []
    for step in steps:
        arrivals.append(_receive(step, buffer, staging, bounds, recv))
        staging = staging[_staged(step, bounds) :]
    yield
    number = 0
    for step, arrival in zip(steps, arrivals, strict=True):
        yield from itertools.repeat(None, step.number - number)
        number = step.number + 1
        sent = _send(step, buffer, bounds, send)
        yield
        _finish(sent, arrival, combine)
    yield from itertools.repeat(None, schedule.num_steps - number)


@dataclass
class _Arrivals:
    """`_Arrivals` are one step's receives: their handles, and the arguments of the calls of `combine`, in order."""

    handles: list[PendingTransfer | None]
    parts: list[tuple[Any, Any, Any]]


def _receive(
    step: RankStep, buffer: B, staging: B, bounds: Sequence[int], recv: Callable[[int, B], PendingTransfer | None]
) -> _Arrivals:
    arrivals = _Arrivals([], [])
    used = 0
    below: dict[int, B] = {}  # with `by_rank`: the data from lower ranks, by chunk; this rank's own part comes next
    for t in step.recvs:
        begin, end = bounds[t.start], bounds[t.stop]
        if end == begin:
            continue
        view = buffer[begin:end]
        if t.kind == "reduce":
            theirs = staging[used : used + end - begin]
            used += end - begin
            lower = below.get(t.start) if step.by_rank else None
            if lower is not None and t.src < t.dst:
                arrivals.parts.append((lower, lower, theirs))
            elif step.by_rank and t.src < t.dst:
                below[t.start] = theirs
            else:
                if lower is not None:
                    arrivals.parts.append((view, below.pop(t.start), view))
                arrivals.parts.append((view, theirs, view) if t.src < t.dst else (view, view, theirs))
            view = theirs
        arrivals.handles.append(recv(t.src, view))
    for start, lower in below.items():
        view = buffer[bounds[start] : bounds[start] + len(lower)]
        arrivals.parts.append((view, lower, view))
    return arrivals


def _send(
    step: RankStep, buffer: B, bounds: Sequence[int], send: Callable[[int, B], PendingTransfer | None]
) -> list[PendingTransfer | None]:
    pieces = [(t.dst, bounds[t.start], bounds[t.stop]) for t in step.sends]
    return [send(dst, buffer[begin:end]) for dst, begin, end in pieces if end > begin]


def _finish(sent: Sequence[PendingTransfer | None], arrivals: _Arrivals, combine: Callable[[B, B, B], object]) -> None:
    for handle in (*sent, *arrivals.handles):
        if handle is not None:
            handle.wait()
    # Combine only now: a chunk may be sent and combined in one step, and must be sent with its old value.
    for into, first, second in arrivals.parts:
        combine(into, first, second)


def _staged(step: RankStep, bounds: Sequence[int]) -> int:
    return sum(bounds[t.stop] - bounds[t.start] for t in step.recvs if t.kind == "reduce")
