"""Whether the ranks of a group share memory; can be asked where there is no C core."""

from __future__ import annotations

import sys

import torch.distributed as dist

# From this size on a gradient has a bucket to itself, lies where autograd wrote it, and is cut between ranks: for a
# smaller one a copy, in the cache, costs less than its own bookkeeping.
LARGE_BYTES = 256 * 1024


def shares_memory(group: dist.ProcessGroup) -> bool:
    """Whether all ranks of `group` share memory. The backend's name does not tell: they may be on several hosts."""
    module = sys.modules.get("phalanx.backend.process_group")  # not imported: where there is no C core, it can't be
    return module is not None and isinstance(group, module.PhalanxProcessGroup) and group.shares_memory
