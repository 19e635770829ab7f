"""Plan which cores and how many threads each rank of a host gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Pinning:
    """A `Pinning` is the threads per rank, and each rank's cores; with an empty tuple a rank runs wherever the agent
    may.
    """

    threads: int
    cpus: tuple[tuple[int, ...], ...]


def plan_placement(cpus: Sequence[int], num_ranks: int, *, pin: bool = True) -> Pinning:
    """Divide the agent's cores into contiguous blocks, one per rank, whose sizes differ by one at most.

    Neighbouring numbers usually share a cache or a NUMA node, hence contiguous. Threads are the same for all ranks (the
    smallest block), so that no rank computes differently. With more ranks than cores nothing is pinned: the scheduler
    shares better than a fixed choice, and each rank has one thread.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    cores = sorted(cpus)
    threads = max(1, len(cores) // num_ranks)
    if not pin or num_ranks > len(cores):
        return Pinning(threads, ((),) * num_ranks)
    bounds = [len(cores) * rank // num_ranks for rank in range(num_ranks + 1)]
    return Pinning(threads, tuple(tuple(cores[a:b]) for a, b in pairwise(bounds)))
