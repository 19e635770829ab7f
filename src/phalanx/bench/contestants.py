"""These are the ways to train one model on one batch with some cores: each function runs in the processes it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import phalanx.backend.create  # noqa: F401 - likewise: the group of each rank does
from phalanx.bench.clock import COUNTS_STOPS, Clock, ClockedForward
from phalanx.bench.sample import Sample, slowest_of
from phalanx.bench.workloads import Workload, loss_of
from phalanx.ddp import DistributedDataParallel
from phalanx.nn import DataParallel
from phalanx.testing import run_ranks
from phalanx.torch_names import find

# Every optimizer imports it at its first step: importing it here happens once, and not in each process.
find("torch._dynamo", loses="the first step of each process takes longer", instead=None)

WARM_UP = 5  # steps: buckets are planned anew, and DistributedDataParallel watches the first three for mistakes


@dataclass(frozen=True)
class Contestant:
    """It is one way to train; `measure(workload, world_size, num_steps)` is one round."""

    name: str
    title: str
    measure: Callable[[Workload, int, int], Sample]


class _ClockedDataParallel(DataParallel):
    """It notes what its parts take."""

    def __init__(self, module: nn.Module, num_replicas: int, clock: Clock) -> None:
        super().__init__(module, num_replicas)
        self._clock = clock

    def __new__(cls, module: nn.Module, num_replicas: int, clock: Clock) -> Any:
        return super().__new__(cls, module, num_replicas)

    def scatter(self, *args: Any) -> Any:
        with self._clock.part("scatter"):
            return super().scatter(*args)

    def replicate(self, *args: Any) -> Any:
        with self._clock.part("replicate"):
            return super().replicate(*args)

    def parallel_apply(self, *args: Any) -> Any:
        with self._clock.part("threads"):
            return super().parallel_apply(*args)

    def gather(self, *args: Any) -> Any:
        with self._clock.part("scatter"):
            return super().gather(*args)


def _train(model: nn.Module, forward: ClockedForward, clock: Clock, inputs: Tensor, num_steps: int) -> Sample:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(WARM_UP + num_steps):
        with clock.step():
            optimizer.zero_grad()
            loss = loss_of(model, inputs)
            wall, computing, stops = forward.take()
            clock.add(computing=min(computing, wall), waiting=max(wall - computing, 0.0), stops=stops)
            if isinstance(model, DataParallel):
                clock.add(threads=-wall)  # so far it is all that the threads took
            with clock.part("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            with clock.part("update"):
                optimizer.step()
    parts = dict(clock.medians(skip=WARM_UP))
    stopped = parts.pop("stops")
    weights = sum((parameter.detach().abs().sum().item() for parameter in model.parameters()), 0.0)
    return Sample(parts.pop("step"), parts, weights, stopped if COUNTS_STOPS else None)


def _alone(_rank: int, _world_size: int, workload: Workload, num_threads: int, num_steps: int) -> Sample:
    torch.set_num_threads(num_threads)
    model = ClockedForward(workload.build())
    return _train(model, model, Clock(), workload.inputs(), num_steps)


def _replicas(_rank: int, _world_size: int, workload: Workload, num_replicas: int, num_steps: int) -> Sample:
    torch.set_num_threads(num_replicas)  # each replica has one
    forward, clock = ClockedForward(workload.build()), Clock()
    model = _ClockedDataParallel(forward, num_replicas, clock)
    return _train(model, forward, clock, workload.inputs(), num_steps)


def _ranks(rank: int, world_size: int, workload: Workload, num_steps: int) -> Sample:
    forward = ClockedForward(workload.build())
    inputs = workload.inputs().chunk(world_size)[rank]
    return _train(DistributedDataParallel(forward), forward, Clock(), inputs, num_steps)


def _measure_one(workload: Workload, world_size: int, num_steps: int) -> Sample:
    (sample,) = run_ranks(_alone, 1, workload, 1, num_steps, init=False)
    return sample  # type: ignore[no-any-return]


def _measure_threads(workload: Workload, world_size: int, num_steps: int) -> Sample:
    (sample,) = run_ranks(_alone, 1, workload, world_size, num_steps, init=False)
    # The thread that runs forward waits for the others of its pool, or spins: its processor time tells nothing.
    parts = dict(sample.parts)
    parts["computing"] += parts.pop("waiting")
    return Sample(sample.step, parts, sample.weights)


def _measure_dp(workload: Workload, world_size: int, num_steps: int) -> Sample:
    (sample,) = run_ranks(_replicas, 1, workload, world_size, num_steps, init=False)
    return sample  # type: ignore[no-any-return]


def _measure_ddp(workload: Workload, world_size: int, num_steps: int) -> Sample:
    return slowest_of(run_ranks(_ranks, world_size, workload, num_steps))


DP, DDP, ONE, POOL = "data-parallel", "distributed-data-parallel", "one-thread", "intra-op-threads"

CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant(ONE, "one process, 1 thread", _measure_one),
        Contestant(POOL, "one process, {} threads in each operation", _measure_threads),
        Contestant(DP, "DataParallel, {} threads", _measure_dp),
        Contestant(DDP, "DistributedDataParallel, {} processes", _measure_ddp),
    )
}
