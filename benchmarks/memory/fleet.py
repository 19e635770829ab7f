"""The ranks of one contestant, which stop at the moments at which their memory is read."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from contestants import CONTESTANTS, perceptron

MOMENTS = ("after backward", "after step", "after zero_grad")


def measure(name: str, width: int, world_size: int, steps: int, folder: Path) -> dict[str, float]:
    """MB (10^6 bytes) of all ranks together above the bare import, at each moment of the last step."""
    context = multiprocessing.get_context("spawn")  # a rank's own import, as a launcher without a zygote makes it
    pipes, processes = [], []
    for rank in range(world_size):
        mine, theirs = context.Pipe()
        arguments = (rank, name, width, world_size, steps, folder / f"{name}-{width}", theirs)
        processes.append(context.Process(target=_serve, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    readings = [sum(_pss(process.pid) for process in processes) for _ in _stops(pipes, 1 + len(MOMENTS))]
    for process in processes:
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{name}: a rank ended with {process.exitcode}")
    bare, *at = readings
    return {moment: (reading - bare) / 1e6 for moment, reading in zip(MOMENTS, at, strict=True)}


def _stops(pipes: list[Connection], count: int) -> Iterator[None]:
    """Yield while all ranks stand still, `count` times."""
    for _ in range(count):
        for pipe in pipes:
            pipe.recv()
        yield
        for pipe in pipes:
            pipe.send(None)


def _pss(pid: int | None) -> int:
    """Bytes of a process, with each shared page divided among those that have it mapped."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this kernel has no Pss in smaps_rollup")


def _serve(rank: int, name: str, width: int, world_size: int, steps: int, meeting: Path, pipe: Connection) -> None:
    def stop() -> None:
        pipe.send(None)
        pipe.recv()

    torch.set_num_threads(1)
    contestant = CONTESTANTS[name]
    stop()
    store = dist.FileStore(str(meeting), world_size)
    dist.init_process_group(
        contestant.backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=300)
    )
    model = contestant.wrap(perceptron(width))
    optimizer = contestant.optimizer(model.parameters())
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = torch.randn(2, 8, 1024, generator=generator)
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        if step == steps - 1:
            dist.barrier()  # nobody is still in backward
            stop()
        optimizer.step()
    stop()
    optimizer.zero_grad()
    stop()
    dist.destroy_process_group()
