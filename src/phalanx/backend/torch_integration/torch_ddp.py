"""Show the batches of PyTorch's DistributedDataParallel over our groups to the code that looks for mistakes."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from phalanx.backend.torch_integration.batch_watches import batch_watches
from phalanx.backend.torch_integration.patch import patch

_watches: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by module; None: it has seen enough


@patch(
    "torch.nn.parallel.DistributedDataParallel._pre_forward(self)",
    "torch.distributed.distributed_c10d._get_process_group_store(pg)",
    loses="nobody warns of equal batches and a forgotten set_epoch in torch's DistributedDataParallel",
)
def look_at_batches() -> None:
    """Let a `phalanx.ddp.batch_watch.BatchWatch` see what each forward is given.

    Nothing is kept in the module itself, which users copy and pickle. A compiled forward is left alone.
    """
    import torch
    import torch.distributed as dist

    module: Any = torch.nn.parallel.DistributedDataParallel
    original = module._pre_forward
    watches = _watches
    is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

    @functools.wraps(original)
    def _pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not is_compiling() and self.training and is_grad_enabled():
            watch = watches.get(self, self)
            if watch is self:  # this is its first forward
                watch = watches[self] = _begin(self.process_group, dist)
            if watch is not None and not watch.look(inputs, kwargs):
                watches[self] = None
        return original(self, *inputs, **kwargs)

    module._pre_forward = _pre_forward


def leave_group(module: Any) -> None:
    """Note that a DistributedDataParallel of torch's goes over to another group."""
    watch = _watches.get(module)
    if watch is not None:
        watch.compare_no_more()


def _begin(group: Any, dist: Any) -> Any:
    """Return a watch for a module over `group`, if that is one of ours."""
    if dist.get_backend(group) != "phalanx" or not batch_watches:
        return None
    c10d: Any = dist.distributed_c10d
    store = c10d._get_process_group_store(group)
    return batch_watches[0](store, dist.get_rank(group), dist.get_world_size(group))
