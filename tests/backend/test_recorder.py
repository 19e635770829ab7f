"""What the core writes into the flight recorder: when an operation ran, and its shape, however often lines recur."""

import time

import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks

from phalanx._comm.diagnostics.flight_recorder import read
from phalanx.testing import run_ranks


def test_times_are_those_of_the_clock_before_and_after_the_core_sets_its_own_by_it():
    # The core reads the processor's counter, which it sets by the clock every few milliseconds, from the first on.
    def check(rank, world_size):
        tensor, core = torch.ones(1), dist.group.WORLD.symm_mem.core
        begun = last = time.monotonic_ns()
        worst = 0
        while last < begun + 100_000_000:
            before = time.monotonic_ns()
            dist.all_reduce(tensor)
            last = time.monotonic_ns()
            record = read(core, rank)[-1]
            assert record.enter_ns <= record.leave_ns
            worst = max(worst, before - record.enter_ns, record.leave_ns - last)
        return worst

    (worst,) = run_ranks(check, 1)
    assert worst < 20_000


@on_ranks(2)
def test_a_line_of_the_recorder_shows_nothing_of_the_operation_that_it_held_before(rank):
    core = dist.group.WORLD.symm_mem.core
    for _ in range(130):  # more than there are lines
        dist.all_reduce(torch.ones(2, 3, 4))
    shapes = [(), (5,), (0,), (6, 1), (1, 1, 1, 1, 2)]
    for shape in shapes:
        dist.all_reduce(torch.ones(shape))
    dist.barrier()
    *_, last = records = read(core, rank)
    assert [record.shape for record in records[-6:-1]] == shapes
    assert (last.name, last.shape, last.status_name) == ("barrier", (), "ok")
    assert len(records) == 128
