"""What being elastic costs while nothing happens, and how fast state is handed over; under `phalanx run`, on two ranks.

costs.py PART FILE: the samples of one part (hand-over, small, larger), as JSON. Each part is a job of its own: only
the first function of a job that is `elastic.run` is elastic.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx
from phalanx import elastic
from phalanx.elastic.state import commits_of
from phalanx.elastic.state_transfer import transfer_state

BLOCKS = 12
TRIAL = 100  # steps in which an elastic job learns what its steps are like; docs/how-to/elastic.md has what they cost
HAND_OVERS = 7
LAYERS, WIDTH = 4, 2048  # 64 MiB of parameters, 192 MiB with Adam's


def build(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def measure_steps(width: int, batch: int, num_steps: int) -> dict[str, list[float]]:
    """Seconds of a step in blocks of steps, in turns without and with `State`; and of each commit."""
    x = torch.randn(batch, width)

    def prepare() -> tuple[nn.Module, Any]:
        model = phalanx.DistributedDataParallel(build(width, 3), check=False)
        return model, torch.optim.Adam(model.parameters())

    plain, watched = prepare(), prepare()
    state = elastic.State(model=watched[0], optimizer=watched[1])
    seconds: dict[str, list[float]] = {"plain": [], "elastic": [], "commit": []}

    def block(model: nn.Module, optimizer: Any, state: Any) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if state is not None:
                at = time.perf_counter()
                state.commit()
                seconds["commit"].append(time.perf_counter() - at)
        return (time.perf_counter() - start) / num_steps

    @elastic.run(state)
    def train(state: Any) -> None:
        for _ in range(TRIAL // num_steps + 1):
            block(*watched, state)
        for number in range(BLOCKS + 2):
            took = {}
            for name in ("plain", "elastic") if number % 2 else ("elastic", "plain"):
                took[name] = block(*plain, None) if name == "plain" else block(*watched, state)
            if number == 1:
                seconds["commit"].clear()
            if number > 1:
                for name, each in took.items():
                    seconds[name].append(each)

    train(state)
    seconds["commit"] = [median(seconds["commit"])]
    return seconds


def measure_hand_over() -> dict[str, Any]:
    """Bytes a second from rank 0 to rank 1, in turns with copying as much within rank 0.

    New memory is what a replacement has for the optimizer's state, its model has memory already.
    """
    rank = dist.get_rank()
    model = build(WIDTH, LAYERS)
    optimizer = torch.optim.Adam(model.parameters())
    if rank == 0:
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = elastic.State(model=model, optimizer=optimizer)
    found: dict[str, Any] = {}

    def timed(name: str, copy: Callable[[], int]) -> None:
        dist.barrier()
        start = time.perf_counter()
        nbytes = copy()
        dist.barrier()
        found.setdefault(name, []).append(nbytes / (time.perf_counter() - start))
        if nbytes:
            found["nbytes"] = nbytes

    def hand() -> int:
        return transfer_state(commits_of(state).parts(), 0, [1], dist.group.WORLD)

    def copy(sources: list[Tensor], places: list[Tensor]) -> int:
        if rank == 0:
            for place, source in zip(places, sources, strict=True):
                place.copy_(source)
        return sum(t.nbytes for t in sources)

    moments = [t for each in optimizer.state.values() for t in each.values() if t.dim()]
    source = [t.detach() for t in model.parameters()] + moments
    for _ in range(HAND_OVERS):
        if rank == 1:
            optimizer.state.clear()  # glibc gives memory of this size back to the system
        timed("hand-over, new", hand)
        timed("hand-over, used", hand)
        num_parameters = len(source) - len(moments)
        places = [t.clone() for t in source[:num_parameters]]  # written to, as a model that was initialised
        places += [torch.empty_like(t) for t in moments]
        timed("memcpy, new", lambda places=places: copy(source, places))  # type: ignore[misc]
        timed("memcpy, used", lambda places=places: copy(source, places))  # type: ignore[misc]
        del places
    return {name: speeds[1:] if isinstance(speeds, list) else speeds for name, speeds in found.items()}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "hand-over": measure_hand_over,
    "small": lambda: measure_steps(64, 32, 60),
    "larger": lambda: measure_steps(512, 128, 12),
}


def main(part: str, path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    found = PARTS[part]()
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
