"""The real measurements, as few as it takes."""

import time

import pytest

from phalanx.bench.clock import Clock, ClockedForward
from phalanx.bench.contestants import CONTESTANTS, DDP, DP, POOL
from phalanx.bench.workloads import WORKLOADS, Workload

SMALL = Workload("small", "2 layers", num_layers=2, width=8, batch=6)


@pytest.mark.slow
def test_all_contestants_end_with_the_same_weights_and_name_the_parts_they_have():
    samples = {name: one.measure(SMALL, 2, 2) for name, one in CONTESTANTS.items()}
    (reference, *others) = [sample.weights for sample in samples.values()]
    assert others == pytest.approx([reference] * 3, rel=1e-5)
    for name, sample in samples.items():
        assert sample.step > 0
        assert ("replicate" in sample.parts) == ("threads" in sample.parts) == (name == DP)
        assert ("waiting" in sample.parts) == (name != POOL)
        assert sum(sample.parts.values()) <= 1.5 * sample.step + 1e-3  # medians do not add up exactly
    assert samples[DDP].stops is not None


def test_the_workloads_are_the_same_in_every_process():
    for workload in WORKLOADS.values():
        one, other = (dict(workload.build().named_parameters()) for _ in range(2))
        assert all(one[name].equal(other[name]) for name in one)
        assert workload.inputs().equal(workload.inputs())
        assert len(workload.inputs()) == workload.batch


def test_a_clock_adds_up_the_parts_of_a_step_and_leaves_out_the_first():
    clock = Clock()
    for amount in (100.0, 1.0, 3.0):
        with clock.step():
            clock.add(part=amount)
            clock.add(part=amount)
    assert clock.medians(skip=1)["part"] == 4.0


def test_a_thread_that_stands_still_is_not_computing():
    import torch

    class Sleeps(torch.nn.Module):
        def forward(self, x):
            time.sleep(0.02)
            return x

    model = ClockedForward(Sleeps())
    model(torch.ones(1))
    wall, computing, stops = model.take()
    assert wall >= 0.02
    assert computing < wall
    assert stops >= 1
