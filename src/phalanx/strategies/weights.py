"""Give all ranks the same first weights, whatever each rank has drawn before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist


@contextlib.contextmanager
def same_random_state(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let all ranks of `group` draw inside what its first rank draws, on the CPU. All ranks enter it.

    A rank that came with that state goes on from where this one ends, so that what all draw after it stays alike; a
    rank that came with its own goes on with that.
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
