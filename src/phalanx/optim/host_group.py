"""Find the ranks that share an update inside of each of several hosts, and give them a group of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

from phalanx._comm.backend.shared import ranks_by_host


def divide_by_host(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of `group` on this host, if they share an update inside of each host.

    They do if they are on several hosts with equally many, at least two on each. Nothing is returned for other groups.
    """
    hosts = ranks_by_host(group)
    sizes = {len(ranks) for ranks in hosts}
    if len(sizes) != 1 or min(sizes) < 2:
        return ()
    return next(ranks for ranks in hosts if group.rank() in ranks)


def make_host_group(group: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a group of `ranks`, which `group` has on this host. They call it together."""
    numbers = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(
        [numbers[rank] for rank in ranks], backend="phalanx", use_local_synchronization=True
    )
    return made


def take_first_ranks_values(parameters: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite `parameters` with those of rank 0 of `group`. All its ranks call it."""
    for parameter in parameters:
        dist.broadcast(parameter.detach(), group=group, group_src=0)
