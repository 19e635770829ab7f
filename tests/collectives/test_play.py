"""Schedules carried out by threads over queues, against numpy."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tests.threads import map_in_threads

from phalanx._comm.schedules import halving_doubling, hierarchical, play, ring
from phalanx._comm.schedules.schedule import chunk_bounds
from phalanx.collectives import ALGORITHMS, Schedule, Topology, build
from phalanx.testing import run_ranks

from .conftest import UNEQUAL, every_schedule

Array = NDArray[np.float32]


class Arrival:
    """A receive under way: what arrives is stored when it is waited for."""

    def __init__(self, source: queue.Queue[Array], view: Array) -> None:
        self._source, self._view = source, view

    def wait(self) -> None:
        self._view[:] = self._source.get(timeout=30)


def run(schedule: Schedule, buffers: list[Array]) -> None:
    """Play all ranks at once, each in a thread, in place."""
    links: dict[tuple[int, int], queue.Queue[Array]] = defaultdict(queue.Queue)

    def play_rank(rank: int) -> None:
        def send(dst: int, view: Array) -> None:
            links[rank, dst].put(view.copy())

        def recv(src: int, view: Array) -> Arrival:
            return Arrival(links[src, rank], view)

        def scratch(length: int) -> Array:
            return np.full(length, np.nan, np.float32)

        def combine(into: Array, first: Array, second: Array) -> None:
            np.add(first, second, out=into)

        steps = play(schedule, rank, buffers[rank], send=send, recv=recv, combine=combine, scratch=scratch)
        for _ in steps:
            pass

    # The defaultdict is filled beforehand: two threads must not make two queues for one link.
    for src in range(schedule.world_size):
        for dst in range(schedule.world_size):
            links[src, dst] = queue.Queue()
    map_in_threads(play_rank, range(schedule.world_size))
    assert all(link.empty() for link in links.values()), "something was sent that nobody received"


def contributions(world_size: int, length: int) -> list[Array]:
    rng = np.random.default_rng(world_size * 1000 + length)
    return [(rng.standard_normal(length) * 10.0 ** rng.integers(-3, 4)).astype(np.float32) for _ in range(world_size)]


def expect(schedule: Schedule, before: list[Array], after: list[Array], bounds: Sequence[int]) -> None:
    total = np.sum([b.astype(np.float64) for b in before], axis=0)
    scale = np.sum([np.abs(b.astype(np.float64)) for b in before], axis=0)

    def is_the_sum(part: Array, begin: int, end: int) -> bool:
        return bool(np.all(np.abs(part - total[begin:end]) <= 1e-6 * schedule.world_size * scale[begin:end]))

    match schedule.operation:
        case "all_reduce":
            assert is_the_sum(after[0], 0, len(total))
            assert all(result.tobytes() == after[0].tobytes() for result in after), "bits differ between ranks"
        case "reduce":
            assert is_the_sum(after[schedule.root], 0, len(total))
        case "reduce_scatter":
            for rank, result in enumerate(after):
                assert is_the_sum(result[bounds[rank] : bounds[rank + 1]], bounds[rank], bounds[rank + 1])
        case "broadcast":
            assert all(result.tobytes() == before[schedule.root].tobytes() for result in after)
        case "all_gather":
            parts = [before[rank][bounds[rank] : bounds[rank + 1]] for rank in range(schedule.world_size)]
            assert all(result.tobytes() == np.concatenate(parts).tobytes() for result in after)


@pytest.mark.slow(but=("0",))
@pytest.mark.parametrize("length", [0, 1, 23])
def test_every_schedule_does_what_its_operation_promises(length: int) -> None:
    for schedule in every_schedule(range(1, 10)):
        if schedule.root not in (0, schedule.world_size - 1):
            continue
        before = contributions(schedule.world_size, length)
        after = [buffer.copy() for buffer in before]
        run(schedule, after)
        expect(schedule, before, after, chunk_bounds(length, schedule.num_chunks))


@pytest.mark.parametrize("sizes", UNEQUAL)
def test_the_hierarchy_runs_over_unequal_hosts_with_halving_between_them(sizes: tuple[int, ...]) -> None:
    schedule = hierarchical.all_reduce(Topology.of_sizes(sizes), halving_doubling.all_reduce(len(sizes)))
    before = contributions(schedule.world_size, 101)
    after = [buffer.copy() for buffer in before]
    run(schedule, after)
    expect(schedule, before, after, [])


def test_two_runs_give_the_same_bits() -> None:
    schedule = build("halving_doubling", "all_reduce", Topology.flat(6))
    results = []
    for _ in range(2):
        buffers = contributions(6, 50)
        run(schedule, buffers)
        results.append(buffers[0].tobytes())
    assert results[0] == results[1]


def test_an_error_of_a_send_reaches_the_caller() -> None:
    def broken(dst: int, view: Array) -> None:
        raise ConnectionResetError(f"rank {dst} is gone")

    nothing: Callable[[int, Array], None] = lambda src, view: None  # noqa: E731
    with pytest.raises(ConnectionResetError, match="rank 1 is gone"):
        list(
            play(
                ring.all_reduce(2),
                0,
                np.zeros(4, np.float32),
                send=broken,
                recv=nothing,
                combine=lambda into, first, second: None,
                scratch=lambda length: np.zeros(length, np.float32),
            )
        )


@pytest.mark.parametrize("sizes", [[1], [1, 1], [1, 1, 1], [2, 2], [1] * 5])
def test_plays_in_turns_give_what_one_after_the_other_gives_with_all_receives_started_first(sizes: list[int]) -> None:
    topology = Topology.of_sizes(sizes)
    for name, algorithm in ALGORITHMS.items():
        if algorithm.one_host and len(sizes) > 1:
            continue
        schedule = build(name, "all_reduce", topology)
        together = contributions(topology.world_size, 23)
        apart = [buffer.copy() for buffer in together]
        run(schedule, apart)
        _play_in_one_thread(schedule, together)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(together, apart, strict=True)), name


def _play_in_one_thread(schedule: Schedule, buffers: list[Array]) -> None:
    """All ranks take a step each in turn; a receive that is waited for must have its message."""
    links: dict[tuple[int, int], queue.Queue[Array]] = defaultdict(queue.Queue)
    posted: list[int] = []

    class Receive:
        def __init__(self, link: queue.Queue[Array], view: Array) -> None:
            self._link, self._view = link, view

        def wait(self) -> None:
            self._view[:] = self._link.get_nowait()

    def start(rank: int) -> Iterator[None]:
        def recv(src: int, view: Array) -> Receive:
            posted.append(rank)
            return Receive(links[src, rank], view)

        return play(
            schedule,
            rank,
            buffers[rank],
            send=lambda dst, view: links[rank, dst].put(view.copy()),
            recv=recv,
            combine=lambda into, first, second: np.add(first, second, out=into),
            scratch=lambda n: np.full(n, np.nan, np.float32),
        )

    plays = [start(rank) for rank in range(schedule.world_size)]
    for one in plays:
        next(one)
    count = len(posted)
    for _ in range(schedule.num_steps):
        for one in plays:
            next(one)
    assert len(posted) == count, "a receive was started after the first pause"
    for one in plays:
        assert list(one) == []


def test_direct_adds_in_the_order_in_which_the_core_adds():
    """It said that chunk c begins at rank c and goes round; the core adds from rank 0 to the last, in every chunk.

    The values cancel, so that each of the three orders leaves another result.
    """

    def value(rank: int, count: int) -> Array:
        parts = np.array([1e8, 1.0, -1e8], np.float32)
        return parts[(np.arange(count) // 7 + rank) % 3]

    counts = (3, 1000, 30_000)  # in the core: staged and added by each, by slices

    def fn(rank: int, world_size: int) -> list[Array]:
        totals = [torch.from_numpy(value(rank, count)) for count in counts]
        for total in totals:
            dist.all_reduce(total)
        return [total.numpy() for total in totals]

    for ours in run_ranks(fn, 3):
        for count, core in zip(counts, ours, strict=True):
            buffers = [value(rank, count) for rank in range(3)]
            expected = (buffers[0] + buffers[1]) + buffers[2]
            run(build("direct", "all_reduce", Topology.one_host(3)), buffers)
            for buffer in (*buffers, core):
                np.testing.assert_array_equal(buffer, expected)
    backwards = (value(2, 1000) + value(1, 1000)) + value(0, 1000)
    assert not np.array_equal(backwards, (value(0, 1000) + value(1, 1000)) + value(2, 1000))
