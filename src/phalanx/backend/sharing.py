"""Whether the ranks of a group share memory; can be asked where there is no C core."""

from __future__ import annotations

import sys

import torch.distributed as dist


def shares_memory(group: dist.ProcessGroup) -> bool:
    """Whether all ranks of `group` share memory. The backend's name does not tell: they may be on several hosts."""
    module = sys.modules.get("phalanx.backend.process_group")  # not imported: where there is no C core, it can't be
    return module is not None and isinstance(group, module.PhalanxProcessGroup) and group.shares_memory
