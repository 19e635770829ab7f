"""Give all ranks the same first weights, whatever each rank has drawn before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist


@contextlib.contextmanager
def same_random_state(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Within it all ranks of `group` draw what its first rank draws, on the CPU. Collective.

    A rank that came with that state goes on from where this one ends, so that what all draw behind it stays alike;
    one that came with its own goes on with that.
    """
    if group is None:
        yield
        return
    own = torch.get_rng_state()
    shared = own.clone()
    dist.broadcast(shared, group=group, group_src=0)
    torch.set_rng_state(shared)
    try:
        yield
    finally:
        if not torch.equal(own, shared):
            torch.set_rng_state(own)
