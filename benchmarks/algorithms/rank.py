"""What one rank of the fleet measures: messages alone, schedules over the engine, and the backend's all_reduce."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import phalanx
from phalanx.collectives import Schedule, Topology, build, execute, ring
from phalanx.collectives.segments import in_segments
from phalanx.engines.gloo import GlooEngine, Pending
from phalanx.testing import Host

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import plan_rounds

KIB, MIB = 2**10, 2**20
_PATIENCE = timedelta(seconds=120)
_TAG = 5
SWAPPED = (4, MIB, 4 * MIB)
"""Bytes that each of two ranks sends the other, to learn what a link does; nothing near what a bucket holds."""
COMBINED = MIB
"""Bytes that a rank adds to others, to learn how fast it does."""


@dataclass(frozen=True)
class Interval:
    """When a rank began and ended something that it did so many times; all processes of a machine share the clock."""

    begin: float
    end: float
    times: int = 1


@dataclass(frozen=True)
class Samples:
    """One rank's spans, round by round: of swaps by bytes, of all_reduce by (schedule | backend, algorithm, bytes).

    `empty` is the backend's all_reduce of nothing: the ranks agree, and nothing moves.
    """

    swaps: dict[int, list[Interval]]
    combined: list[Interval]
    empty: list[Interval]
    reductions: dict[tuple[str, str, int], list[Interval]]


def rank_main(
    rank: int,
    world_size: int,
    machines: list[Host],
    per_host: int,
    algorithms: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
) -> Samples:
    """Enter this rank's host and measure; all ranks do the same in the same order.

    The backend runs every algorithm between hosts. Over the engine alone, schedules run if each host has one rank.
    """
    host = machines[rank // per_host]
    host.enter()
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    store = dist.TCPStore(machines[0].address, 29512, world_size, rank == 0)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=world_size, timeout=_PATIENCE)
    engine = GlooEngine(dist.PrefixStore("alone", store), rank, world_size, _PATIENCE, address=host.address)
    actions: dict[tuple[str, str], Callable[[torch.Tensor], object]] = {}
    for name in algorithms:
        group = dist.new_group(list(range(world_size)), backend="phalanx", pg_options=phalanx.Options(algorithm=name))
        actions["backend", name] = partial(dist.all_reduce, group=group)
        if per_host == 1:
            schedule = build(name, "all_reduce", Topology.flat(world_size))
            actions["schedule", name] = partial(_play, engine, schedule, rank, range(world_size))

    # The first of each warms up: buffers, and connections that have not carried anything yet.
    swaps = {nbytes: [_swap(engine, nbytes, per_host) for _ in range(rounds + 1)][1:] for nbytes in SWAPPED}
    mine, theirs = torch.ones(COMBINED // 4), torch.ones(COMBINED // 4)
    combined = [_timed(lambda: mine.add_(theirs), 1) for _ in range(rounds + 1)][1:]
    nothing = partial(_repeat, partial(dist.all_reduce, torch.empty(0)), _times(0))
    empty = [_timed(nothing, _times(0)) for _ in range(rounds + 1)][1:]
    reductions: dict[tuple[str, str, int], list[Interval]] = {}
    for size in sizes:
        for (how, name), action in actions.items():
            _check(action, f"{name} by the {how}", size)  # and warm up
        tensor = torch.zeros(max(1, size // 4))
        for order in plan_rounds(list(actions), rounds):
            for how, name in order:
                action = partial(_repeat, partial(actions[how, name], tensor), _times(size))
                span = _timed(action, _times(size))
                reductions.setdefault((how, name, size), []).append(span)
    dist.destroy_process_group()
    return Samples(swaps, combined, empty, reductions)


def _check(action: Callable[[torch.Tensor], object], what: str, size: int) -> None:
    tensor = torch.full((max(1, size // 4),), dist.get_rank() + 1.0)
    action(tensor)
    expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
    if not bool((tensor == expected).all()):
        raise SystemExit(f"{what}: all_reduce of {size} bytes gave {tensor[:4].tolist()}, not {expected}")


def _times(nbytes: int) -> int:
    """What is short is done many times, so that it matters less who begins first."""
    return max(1, min(20, 256 * KIB // max(1, nbytes)))


def _repeat(action: Callable[[], object], times: int) -> None:
    for _ in range(times):
        action()


def _timed(action: Callable[[], object], times: int) -> Interval:
    """Do `action` on all ranks at once, `times` times; or once, if it is so many things itself."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    return Interval(begin, time.perf_counter(), times)


def _swap(engine: GlooEngine, nbytes: int, per_host: int) -> Interval:
    """The first ranks of hosts 0 and 1 send each other `nbytes`; the rest idle.

    Played as the schedule that it is, an all_gather of two ranks, in as many segments as it is done times.
    """
    times = _times(nbytes)
    pair = [0, per_host]
    if engine.rank not in pair:
        idle = _timed(lambda: None, times)
        return replace(idle, end=idle.begin)
    buffer = torch.zeros(2 * nbytes * times, dtype=torch.uint8)
    swaps = in_segments(ring.all_gather(2), times)
    return _timed(partial(_play, engine, swaps, pair.index(engine.rank), pair, buffer), times)


def _play(engine: GlooEngine, schedule: Schedule, me: int, ranks: Sequence[int], buffer: torch.Tensor) -> None:
    """Carry out `schedule` between `ranks`, of which this one is number `me`."""
    execute(
        schedule,
        me,
        buffer,
        send=lambda dst, view: _UnderWay(engine.send(ranks[dst], view, _TAG)),
        recv=lambda src, view: _UnderWay(engine.recv(ranks[src], view, _TAG)),
        combine=lambda into, first, second: torch.add(first, second, out=into),
        scratch=lambda n: torch.empty(n, dtype=buffer.dtype),
    )


class _UnderWay:
    """A message that is not there yet."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def wait(self) -> None:
        self._pending.wait(_PATIENCE)
