"""The processes of one contestant: they build the model once, and then run steps whenever they are asked."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.optim
from models import Workload
from torch import nn

from phalanx import DistributedDataParallel, Options, ZeroRedundancyOptimizer
from phalanx.testing import Host

Times = dict[str, float]  # seconds per step, by part
PARTS = ("step", "forward_backward", "update")


@dataclass(frozen=True)
class Contestant:
    """How a model is trained: connected by what, wrapped in what; by one process, or on as many ranks as the others."""

    backend: str | None = None
    wrap: Callable[[nn.Module], nn.Module] | None = None
    sharded: Callable[..., torch.optim.Optimizer] | None = None  # a ZeroRedundancyOptimizer
    num_threads: int = 1  # inside each operation; a process has as many cores, and as many ranks' batches
    options: Callable[[], object] = lambda: None  # of the backend
    is_one: bool = False


@dataclass(frozen=True)
class Place:
    """A place is where the ranks are: on this machine, or so many on each of several hosts."""

    per_host: int = 2
    machines: Sequence[Host] = ()

    @property
    def world_size(self) -> int:
        """Return how many ranks a contestant has that is not one process."""
        return self.per_host * max(1, len(self.machines))


def _pytorch(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def _pytorch_views(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)


def _without_gather(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(*args, gather_gradients=False, **kwargs)


def _bfloat16() -> object:
    return Options(wire_dtype=torch.bfloat16)


CONTESTANTS = {
    "pytorch-gloo": Contestant("gloo", _pytorch),
    "pytorch-views-gloo": Contestant("gloo", _pytorch_views),
    "pytorch-phalanx": Contestant("phalanx", _pytorch),
    "phalanx-gloo": Contestant("gloo", DistributedDataParallel),
    "phalanx-phalanx": Contestant("phalanx", DistributedDataParallel),
    "phalanx-bfloat16": Contestant("phalanx", DistributedDataParallel, options=_bfloat16),
    "pytorch-zero-gloo": Contestant("gloo", _pytorch, torch.distributed.optim.ZeroRedundancyOptimizer),
    "phalanx-zero": Contestant("phalanx", DistributedDataParallel, ZeroRedundancyOptimizer),
    "phalanx-zero-sliced": Contestant("phalanx", DistributedDataParallel, _without_gather),
    "alone": Contestant(is_one=True),
    "threads": Contestant(num_threads=2, is_one=True),
    "unconnected": Contestant(),
}


class Team:
    """The ranks of one contestant, which wait, without spinning, between its turns."""

    def __init__(self, name: str, workload: Workload, warmup: int, folder: Path, place: Place) -> None:
        contestant = CONTESTANTS[name]
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("fork")  # torch is imported once, here
        for rank in range(1 if contestant.is_one else place.world_size):
            mine, theirs = context.Pipe()
            arguments = (rank, contestant, workload, warmup, folder / f"{name}-{workload.name}", theirs, place)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self.final_loss = max(pipe.recv() for pipe in self._pipes)

    def measure(self, steps: int) -> Times:
        """Medians over `steps`, of the rank whose steps took longest."""
        for pipe in self._pipes:
            pipe.send(steps)
        times: list[Times] = [pipe.recv() for pipe in self._pipes]
        return max(times, key=lambda one: one["step"])

    def close(self) -> None:
        """Let the ranks leave."""
        for pipe in self._pipes:
            pipe.send(0)
        for process in self._processes:
            process.join()


def _serve(
    rank: int,
    contestant: Contestant,
    workload: Workload,
    warmup: int,
    store_file: Path,
    pipe: Connection,
    place: Place,
) -> None:
    torch.set_num_threads(contestant.num_threads)
    if place.machines:
        place.machines[rank // place.per_host].enter()
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    cores = sorted(os.sched_getaffinity(0))
    wanted = contestant.num_threads
    if place.world_size <= len(cores):
        os.sched_setaffinity(0, cores[rank * wanted : (rank + 1) * wanted])
    if contestant.backend is not None:
        dist.init_process_group(
            contestant.backend,
            store=dist.FileStore(str(store_file), place.world_size),
            rank=rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=120),
            pg_options=contestant.options(),
        )
    step = _prepare(workload, rank, contestant)
    for _ in range(warmup):
        loss, _ = step()
    pipe.send(loss)
    while (count := pipe.recv()) > 0:
        times = [step()[1] for _ in range(count)]
        pipe.send({part: statistics.median(one[part] for one in times) for part in PARTS})
    if contestant.backend is not None:
        dist.destroy_process_group()


def _prepare(workload: Workload, rank: int, contestant: Contestant) -> Callable[[], tuple[float, Times]]:
    torch.manual_seed(0)
    model = workload.build()
    if contestant.wrap is not None:
        model = contestant.wrap(model)
    optimizer: torch.optim.Optimizer
    if contestant.sharded is not None:
        optimizer = contestant.sharded(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = [workload.batch(torch.Generator().manual_seed(rank + part)) for part in range(contestant.num_threads)]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))

    def step() -> tuple[float, Times]:
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = workload.loss(model(inputs), targets)
        loss.backward()
        middle = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        return loss.item(), {"step": end - begin, "forward_backward": middle - begin, "update": end - middle}

    return step
