"""The ranks of one contestant, which stop at the moments at which their memory is read."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from contestants import CONTESTANTS, perceptron

KINDS = ("shared by the ranks", "of each rank alone", "files (code)")
MOMENTS = ("after backward", "after step", "after zero_grad")


def measure(name: str, width: int, world_size: int, steps: int, folder: Path) -> dict[str, dict[str, float]]:
    """MB (10^6 bytes) of all ranks together above the bare import, at each moment of the last step, by mapping."""
    context = multiprocessing.get_context("spawn")  # a rank's own import, as a launcher without a zygote makes it
    pipes, processes = [], []
    for rank in range(world_size):
        mine, theirs = context.Pipe()
        arguments = (rank, name, width, world_size, steps, folder / f"{name}-{width}", theirs)
        processes.append(context.Process(target=_serve, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    readings = [sum((pss(process.pid) for process in processes), Counter()) for _ in _stops(pipes, 1 + len(MOMENTS))]
    for process in processes:
        process.join()
        if process.exitcode != 0:
            raise SystemExit(f"{name}: a rank ended with {process.exitcode}")
    bare, *at = readings
    return {
        moment: {kind: (reading[kind] - bare[kind]) / 1e6 for kind in KINDS}
        for moment, reading in zip(MOMENTS, at, strict=True)
    }


def _stops(pipes: list[Connection], count: int) -> Iterator[None]:
    """Yield while all ranks stand still, `count` times."""
    for _ in range(count):
        for pipe in pipes:
            pipe.recv()
        yield
        for pipe in pipes:
            pipe.send(None)


def pss(pid: int | None) -> Counter[str]:
    """Bytes of a process by kind of mapping, with each shared page divided among those that have it mapped."""
    bytes_of: Counter[str] = Counter()
    kind = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split(maxsplit=5)
        if "-" in first:  # addresses: a mapping begins
            kind = _kind(rest[4] if len(rest) > 4 else "")
        elif first == "Pss:":
            bytes_of[kind] += int(rest[0]) * 1024
    if not bytes_of:
        raise SystemExit("this kernel has no Pss in smaps")
    return bytes_of


def _kind(path: str) -> str:
    if "phalanx" in path and ("memfd" in path or "(deleted)" in path):
        return "shared by the ranks"
    return "files (code)" if path.startswith("/") else "of each rank alone"


def _serve(rank: int, name: str, width: int, world_size: int, steps: int, store_file: Path, pipe: Connection) -> None:
    def stop() -> None:
        pipe.send(None)
        pipe.recv()

    torch.set_num_threads(1)
    contestant = CONTESTANTS[name]
    stop()
    store = dist.FileStore(str(store_file), world_size)
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
