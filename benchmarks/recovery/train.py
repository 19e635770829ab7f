"""A small model in training, until it is stopped: with `phalanx.elastic`, plainly with a checkpoint, or with torchft.

    train.py KIND FOLDER [BYTES]

Every completed step is a line in FOLDER/steps: rank, process, step, number of ranks, CLOCK_MONOTONIC.
BYTES: so much more state, of an elastic job. On several hosts, HOST_NUMBER stands for the rank in these lines.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BATCH, FEATURES, HIDDEN = 32, 64, 128
Stamp = Callable[..., None]


def build() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """What a rank trains with in a step."""
    draw = torch.Generator().manual_seed(2 * step + rank)
    return torch.randn(BATCH, FEATURES, generator=draw), torch.randn(BATCH, 1, generator=draw)


def hold(nbytes: int) -> dict[str, Any]:
    """A module and its Adam of so many bytes in all, which no step changes: so that steps are short."""
    table = nn.Linear(1, nbytes // 12, bias=False, device="meta").to_empty(device="cpu")
    optimizer = torch.optim.Adam(table.parameters())
    if int(os.environ.get("PHALANX_GENERATION", "0")) == 0:
        table.weight.detach().fill_(1.0)
        moments = {name: torch.ones_like(table.weight) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[table.weight] = {"step": torch.tensor(1.0), **moments}
    return {"table": table, "table_optimizer": optimizer}


def train_elastic(folder: Path, stamp: Stamp, more_bytes: int = 0) -> None:
    """Who is lost is replaced, and receives the state from who is not."""
    import phalanx
    from phalanx import elastic

    dist.init_process_group("phalanx")
    model = phalanx.DistributedDataParallel(build())
    optimizer = torch.optim.Adam(model.parameters())
    things: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if more_bytes:
        things |= hold(more_bytes)
    state = elastic.State(**things)

    @elastic.run(state)
    def train(state: Any) -> None:
        while True:
            x, y = batch(state.step, dist.get_rank())
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            state.commit()
            stamp(state.step, dist.get_world_size())

    train(state)


def train_plain(folder: Path, stamp: Stamp, backend: str) -> None:
    """All are started again, and read the checkpoint, of every 100th step."""
    timeout = timedelta(seconds=int(os.environ.get("TIMEOUT_S", "1800")))
    dist.init_process_group(backend, timeout=timeout)
    if backend == "phalanx":
        import phalanx

        model: nn.Module = phalanx.DistributedDataParallel(build())
    else:
        model = nn.parallel.DistributedDataParallel(build())
    optimizer = torch.optim.Adam(model.parameters())
    path, first = folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    step = first
    while True:
        x, y = batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        step += 1
        stamp(step, dist.get_world_size())
        if step % 100 == 0 and dist.get_rank() == 0:
            things = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(things, folder / "checkpoint.new")
            os.replace(folder / "checkpoint.new", path)


def train_torchft(folder: Path, stamp: Stamp) -> None:
    """As torchft's own example does: a replica group of one process each, which a launcher of its own starts again."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    group = int(os.environ["REPLICA_GROUP_ID"])
    model = build()
    inner = torch.optim.Adam(model.parameters())

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        inner.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"train_{group}",
        timeout=timedelta(seconds=10),
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    while True:
        x, y = batch(manager.current_step(), group)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            stamp(manager.current_step(), manager.num_participants())


def main(kind: str, folder: Path, more_bytes: int = 0) -> None:
    torch.set_num_threads(1)

    steps = os.open(folder / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def stamp(step: int, num_ranks: int) -> None:
        number = os.environ.get("HOST_NUMBER") or os.environ.get("REPLICA_GROUP_ID") or os.environ["RANK"]
        os.write(steps, f"{number} {os.getpid()} {step} {num_ranks} {time.monotonic():.6f}\n".encode())

    if kind == "elastic":
        train_elastic(folder, stamp, more_bytes)
    elif kind == "torchft":
        train_torchft(folder, stamp)
    else:
        train_plain(folder, stamp, kind)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
