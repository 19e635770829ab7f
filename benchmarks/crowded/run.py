"""How long is a step on a crowded host? Two ranks beside busy processes, and beside other training jobs."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402 - the line above says where it is
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from phalanx import DistributedDataParallel  # noqa: E402

PEER = "PyTorch's DDP, Gloo"
CONTESTANTS: dict[str, tuple[str, Callable[[nn.Module], nn.Module]]] = {
    PEER: ("gloo", nn.parallel.DistributedDataParallel),
    "PyTorch's DDP, Phalanx": ("phalanx", nn.parallel.DistributedDataParallel),
    "Phalanx's DDP, Phalanx": ("phalanx", DistributedDataParallel),
}
CROWDS = {"nobody": (0, 0), "2 busy": (2, 0), "8 busy": (8, 0), "3 jobs": (0, 3)}  # busy processes, jobs of two ranks
WORLD_SIZE = 2
_context = multiprocessing.get_context("fork")  # torch is imported once, here


def prepare(work: str, wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    """Return one step of `work`: a small model's, or an all_reduce of 80 kB with a matmul."""
    torch.manual_seed(dist.get_rank())
    if work == "all_reduce":
        matrix, tensor = torch.randn(192, 192), torch.ones(20_000)

        def reduce() -> None:
            torch.mm(matrix, matrix)
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

        return reduce
    model = wrap(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(32, 64), torch.randint(10, (32,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def _serve(rank: int, work: str, contestant: str, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    backend, wrap = CONTESTANTS[contestant]
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=600),
    )
    step = prepare(work, wrap)
    for _ in range(50):
        step()
    pipe.send(None)
    while (count := pipe.recv()) != 0:
        if count < 0:  # until it is killed; what the ranks say of each other then is of no interest
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            while True:
                step()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        pipe.send((time.perf_counter() - begin) / count)
    dist.destroy_process_group()


class Job:
    """Two ranks that wait, without spinning, until they are asked for steps."""

    def __init__(self, work: str, contestant: str, store: str) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(WORLD_SIZE):
            mine, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, work, contestant, store, theirs), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def measure(self, steps: int) -> float:
        """Return the seconds of a step, of the slower rank, over `steps`."""
        for pipe in self._pipes:
            pipe.send(steps)
        return max(pipe.recv() for pipe in self._pipes)

    def run(self) -> None:
        """Begin with steps that go on until `kill`."""
        for pipe in self._pipes:
            pipe.send(-1)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(0)
        for process in self._processes:
            process.join()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _be_busy() -> None:
    while True:
        pass


@contextlib.contextmanager
def crowd(name: str, work: str, contestant: str, folder: str) -> Iterator[None]:
    """Have others use the cores: busy processes, or jobs that do the same work in the same way."""
    num_busy, num_jobs = CROWDS[name]
    busy = [_context.Process(target=_be_busy, daemon=True) for _ in range(num_busy)]
    for process in busy:
        process.start()
    jobs = [Job(work, contestant, f"{folder}/{os.urandom(8).hex()}") for _ in range(num_jobs)]
    for job in jobs:
        job.run()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()
        for job in jobs:
            job.kill()


def measure(work: str, name: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return every contestant's seconds per step, round by round."""
    times: dict[str, list[float]] = {contestant: [] for contestant in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        jobs = {each: Job(work, each, f"{folder}/{number}") for number, each in enumerate(CONTESTANTS)}
        for order in harness.plan_rounds(list(CONTESTANTS), rounds):
            for each in order:
                with crowd(name, work, each, folder):
                    times[each].append(jobs[each].measure(steps))
        for job in jobs.values():
            job.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs="+", choices=("ddp", "all_reduce"), default=["ddp", "all_reduce"])
    parser.add_argument("--crowds", nargs="+", choices=CROWDS, default=list(CROWDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="per round")
    harness.add_output_arguments(parser, HERE)
    arguments = parser.parse_args()
    samples = {}
    for work in arguments.work:
        rows = []
        for name in arguments.crowds:
            times = samples[f"{work}, {name}"] = measure(work, name, arguments.rounds, arguments.steps)
            for each in CONTESTANTS:
                ratios = harness.summarise(one / peer for one, peer in zip(times[each], times[PEER], strict=True))
                cells = [name, each, harness.format_time(statistics.median(times[each]))]
                rows.append([*cells, harness.format_ratio(ratios.median), harness.format_ratio(ratios.high)])
        harness.print_table(["beside", "who", "step", "of the peer", "worst round"], rows, title=work)
    harness.write_results(arguments.output, {"seconds_per_step": samples}, machine=harness.describe_machine())


if __name__ == "__main__":
    main()
