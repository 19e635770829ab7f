"""Count on one rank, while it reduces, time, processor time, waits, and what its host sends."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.testing import Host

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import plan_rounds
from harness.ranks import join_on_host

BACKENDS = ("gloo", "phalanx")
_ROUND_S = 0.3  # of calls, back to back, or one call


@dataclass(frozen=True)
class Sample:
    """A sample is one round of one backend and size: for each call, seconds of the slowest rank, and a rank's means.

    `cpu_s` is processor time of all threads of a rank, `waits` how often one of them gave up its core to wait. `sent`
    and `packets` are bytes and packets that left a rank through the interfaces of its host, loopback's included.
    """

    seconds: float
    cpu_s: float
    waits: float
    sent: float
    packets: float


Samples = dict[tuple[str, int], list[Sample]]  # by backend and bytes


def rank_main(
    rank: int, world_size: int, machines: Sequence[Host], per_host: int, sizes: Sequence[int], rounds: int
) -> Samples:
    """Enter this rank's host, check both backends' sums, and measure them in turns."""
    join_on_host(rank, world_size, machines, per_host)
    groups = {"gloo": dist.new_group(backend="gloo"), "phalanx": dist.group.WORLD}
    samples: Samples = {}
    for nbytes in sizes:
        tensor = torch.zeros(max(1, nbytes // 4))
        calls = {name: _calls_of(tensor, groups[name], world_size, rank) for name in BACKENDS}
        for order in plan_rounds(BACKENDS, rounds):
            for name in order:
                samples.setdefault((name, nbytes), []).append(
                    _measure(tensor, groups[name], calls[name], per_host, world_size)
                )
    dist.destroy_process_group()
    return samples


def _calls_of(tensor: torch.Tensor, group: dist.ProcessGroup | None, world_size: int, rank: int) -> int:
    """Return how many calls make a round, equal on all ranks; the first one is checked."""
    tensor.fill_(rank + 1.0)
    dist.all_reduce(tensor, group=group)
    if not bool((tensor == world_size * (world_size + 1) / 2).all()):
        raise SystemExit(f"all_reduce of {tensor.nbytes} bytes gave {tensor[:4].tolist()} on {world_size} ranks")
    tensor.zero_()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(3):
        dist.all_reduce(tensor, group=group)
    took = torch.tensor([(time.perf_counter() - begin) / 3])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return max(1, min(1000, int(_ROUND_S / took.item())))


def _measure(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, calls: int, per_host: int, world_size: int
) -> Sample:
    dist.barrier()
    sent, packets = _sent()
    used, waits = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    begin = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    seconds = time.perf_counter() - begin
    used, waits = time.process_time() - used, resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - waits
    dist.barrier()
    after = _sent()
    # Every rank of a host counts what all of the host sent.
    counts = torch.tensor([used, waits, (after[0] - sent) / per_host, (after[1] - packets) / per_host])
    slowest = torch.tensor([seconds])
    dist.all_reduce(counts)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return Sample(slowest.item() / calls, *(counts / world_size / calls).tolist())


def _sent() -> tuple[int, int]:
    """Return the bytes and packets that have left through the interfaces of this host, loopback's included."""
    lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    columns = [line.partition(":")[2].split() for line in lines]
    return sum(int(column[8]) for column in columns), sum(int(column[9]) for column in columns)
