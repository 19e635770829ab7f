"""Measure the time of collectives between ranks on this host, on the CPU or on GPUs, which ranks may share."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.testing import run_ranks

SIZES = (4 * 2**10, 256 * 2**10, 4 * 2**20, 64 * 2**20)
_BATCH_BYTES = 64 << 20
_MOST_CALLS = 50
_TIMEOUT_S = 900.0

Seconds = dict[str, dict[int, float]]


def refuse(device: str, cuda: bool, gpus: int) -> str:
    """Return why `device` cannot be measured, or ""."""
    if device == "cuda" and not (cuda and gpus):
        return (
            f"--device cuda: this PyTorch ({torch.__version__}) sees no CUDA device. `phalanx doctor` says why; "
            "--device cpu measures the host's memory."
        )
    return ""


def measure(world_size: int, device: str, rounds: int) -> Seconds:
    """Return the median seconds of each collective on the slowest rank, by the collective's name and tensor bytes.

    Raises:
        RankFailed: a rank failed.
    """
    start: Any = "spawn" if device == "cuda" else None  # a fork of a process that has initialised CUDA cannot use a GPU
    by_rank: list[Seconds] = run_ranks(_rank, world_size, device, rounds, start=start, timeout=_TIMEOUT_S)
    return {name: {size: max(seconds[name][size] for seconds in by_rank) for size in SIZES} for name in by_rank[0]}


def _rank(rank: int, world_size: int, device: str, rounds: int) -> Seconds:
    place = torch.device("cpu")
    if device == "cuda":
        place = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
    return {
        name: {size: _median(_call(name, size, place, world_size), size, place, rounds) for size in SIZES}
        for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
    }


def _call(name: str, size: int, device: torch.device, world_size: int) -> Callable[[], Any]:
    """Return a function that calls the collective on a tensor, or on parts of a tensor, of about `size` bytes."""
    whole = torch.zeros(size // 4 // world_size * world_size, device=device)
    part = torch.zeros(whole.numel() // world_size, device=device)
    parts: list[Tensor] = list(whole.chunk(world_size))
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather": lambda: dist.all_gather(parts, part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
    }
    return calls[name]


def _median(call: Callable[[], Any], size: int, device: torch.device, rounds: int) -> float:
    count = max(1, min(_MOST_CALLS, _BATCH_BYTES // size))
    call()
    times = []
    for _ in range(rounds):
        dist.barrier()
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        _synchronize(device)
        times.append((time.perf_counter() - begin) / count)
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_text(seconds: Seconds, world_size: int, where: str) -> list[str]:
    """Return a line for each collective: milliseconds by size, and GB/s for the largest size."""
    lines = [f"{world_size} ranks on {where}: milliseconds a call, by the bytes of the whole tensor"]
    sizes: Sequence[int] = SIZES
    lines.append(" " * 16 + "".join(f"{f'{size >> 10} KiB':>12}" for size in sizes) + "        GB/s")
    for name, times in seconds.items():
        cells = "".join(f"{1e3 * times[size]:12.3f}" for size in sizes)
        lines.append(f"{name:16}{cells}{sizes[-1] / times[sizes[-1]] / 1e9:12.2f}")
    return lines


def as_json(seconds: Seconds, world_size: int, where: str) -> str:
    """Return the results as JSON, for programs."""
    return json.dumps({"world_size": world_size, "device": where, "seconds": seconds}, indent=2)
