"""Plan which cores and how many threads each rank of a host gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Pinning:
    """A `Pinning` is the threads per rank, and each rank's cores; an empty tuple lets a rank run on all the agent's."""

    threads: int
    cpus: tuple[tuple[int, ...], ...]


def plan_placement(cpus: Sequence[int], num_ranks: int, *, cores: int | None = None, pin: bool = True) -> Pinning:
    """Divide the agent's cores into contiguous blocks, one per rank, whose sizes differ by one at most.

    Neighbouring numbers usually share a cache or a NUMA node, hence contiguous. Threads are the same for all ranks (the
    smallest block), so that no rank computes differently. With more ranks than cores nothing is pinned: the scheduler
    shares better than a fixed choice, and each rank has one thread. `cores` is how many of them may compute at a time
    (a control group may grant less time than the agent has cores); by default all.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    usable = sorted(cpus)
    threads = max(1, (len(usable) if cores is None else cores) // num_ranks)
    if not pin or num_ranks > len(usable):
        return Pinning(threads, ((),) * num_ranks)
    bounds = [len(usable) * rank // num_ranks for rank in range(num_ranks + 1)]
    return Pinning(threads, tuple(tuple(usable[a:b]) for a, b in pairwise(bounds)))
