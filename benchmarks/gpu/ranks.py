"""What one rank does: the same exchange and the same step over each group, in turns, timed on the device."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import phalanx

HERE = Path(__file__).resolve().parent
SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20)
# Models of benchmarks/ddp by the number of ranks, and how much larger than elsewhere their batch is.
STEPS = {
    1: (("perceptron", 1), ("perceptron", 32), ("transformer", 1)),
    2: (("perceptron", 1), ("transformer", 1)),
}
# What the device computes for all ranks; nobody exchanges anything.
ALONE = "no exchange"


def measure(rank: int, world_size: int, kind: str, peer: str, rounds: int, steps: int, batch: int) -> dict[str, object]:
    """Seconds of an all_reduce of each size and of a step of each model, by contestant, one for each round."""
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "ddp")]
    device = torch.device(kind, 0) if kind != "cpu" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    groups = {"phalanx": dist.group.WORLD, f"pytorch-{peer}": dist.new_group(backend=peer)}
    named = {group: name for name, group in groups.items()}
    times: dict[str, dict[str, list[float]]] = {}
    if world_size > 1:
        for size in SIZES:
            count = max(1, min(200, (64 << 20) // size))
            calls = {name: _all_reduce(size, group, device, rank, world_size) for name, group in groups.items()}
            times[f"all_reduce {size >> 10} KiB"] = _in_turns(calls, count, rounds, device)
    from models import WORKLOADS

    for workload, times_batch in STEPS.get(world_size, ()):
        of = WORKLOADS[workload], batch * times_batch
        calls = {name: _step(*of, named[group], group, device, rank) for name, group in groups.items()}
        if world_size > 1:
            calls[ALONE] = _step(*of, ALONE, None, device, rank)
        larger = f", {times_batch} times the batch" if times_batch > 1 else ""
        times[f"step of {workload}{larger}"] = _in_turns(calls, steps, rounds, device)
    dist.barrier()
    return {"seconds": times, "device": torch.cuda.get_device_name(device) if kind == "cuda" else kind}


def _all_reduce(
    size: int, group: dist.ProcessGroup, device: torch.device, rank: int, world_size: int
) -> Callable[[], None]:
    """An all_reduce of `size` bytes, checked once for its values."""
    tensor = torch.full((size // 4,), rank + 1.0, device=device)
    dist.all_reduce(tensor, group=group)
    expected = world_size * (world_size + 1) / 2
    if not bool((tensor == expected).all()):
        raise RuntimeError(f"all_reduce of {size} bytes gave {tensor[:4].tolist()}, and the sum is {expected}")
    tensor.zero_()
    return lambda: dist.all_reduce(tensor, group=group)


def _step(
    workload, batch: int, name: str, group: dist.ProcessGroup | None, device: torch.device, rank: int
) -> Callable[[], None]:
    """A training step of a model that was wrapped for `group`; ours by our class, PyTorch's by PyTorch's; or bare."""
    torch.manual_seed(0)
    model = workload.build().to(device)
    if name != ALONE:
        is_peer = name.startswith("pytorch-")
        wrap = nn.parallel.DistributedDataParallel if is_peer else phalanx.DistributedDataParallel
        model = wrap(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    parts = [workload.batch(generator) for _ in range(batch)]
    inputs, targets = (torch.cat(one).to(device) for one in zip(*parts, strict=True))

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()

    for _ in range(5):  # buckets are rebuilt in them, kernels chosen
        step()
    return step


def _in_turns(
    calls: dict[str, Callable[[], None]], count: int, rounds: int, device: torch.device
) -> dict[str, list[float]]:
    from harness import plan_rounds

    times: dict[str, list[float]] = {name: [] for name in calls}
    for order in plan_rounds(list(calls), rounds):
        for name in order:
            dist.barrier()
            _synchronize(device)
            begin = time.perf_counter()
            for _ in range(count):
                calls[name]()
            _synchronize(device)
            times[name].append((time.perf_counter() - begin) / count)
    return times


def _synchronize(device: torch.device) -> None:
    with contextlib.suppress(AttributeError):
        torch.get_device_module(device).synchronize()
