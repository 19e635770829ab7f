"""Decide when the wrapper makes BatchNorm layers normalize over all ranks' batches, and convert them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx._base.log import get_logger
from phalanx.nn.sync_batchnorm import SyncBatchNorm, find_batchnorms

SYNC_BELOW = 16
"""Samples per rank below which statistics of a rank's own batch are taken to be too noisy.

Wu and He (2018), Group Normalization, table 2: ResNet-50's error on ImageNet with BatchNorm is 23.6% with 32 samples
per worker, 23.7% with 16, and then 24.8% with 8, 27.3% with 4 and 34.7% with 2.
"""

_UNKNOWN = 2**62  # this stands for a batch that can't be seen: it decides nothing, and is above every threshold

SyncChoice = Literal["auto"] | bool

_logger = get_logger(__name__)


def check_choice(choice: object) -> None:
    """Refuse what is neither True, False nor "auto".

    Raises:
        ValueError: `choice` is something else.
    """
    if not (choice is True or choice is False or choice == "auto"):
        raise ValueError(f'sync_batchnorm must be True, False or "auto", got {choice!r}')


def batch_size(inputs: Iterable[Tensor]) -> int | None:
    """Return dimension 0 of the first of a forward's input tensors that has one; None if there is none."""
    return next((tensor.shape[0] for tensor in inputs if tensor.dim()), None)


def decide_sync(smallest_batch: int) -> bool:
    """Return whether layers shall span ranks, when the rank with the fewest samples has `smallest_batch`."""
    return smallest_batch < SYNC_BELOW


def span_ranks(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Convert the BatchNorm layers of `module`, where they stand, to normalize over `group`."""
    # A layer that names a group can't be copied or pickled, and the default group needs no name.
    SyncBatchNorm.convert_sync_batchnorm(module, None if group is dist.group.WORLD else group)


def sync_if_small(module: nn.Module, inputs: Iterable[Tensor], group: dist.ProcessGroup, device: torch.device) -> bool:
    """Convert the module's BatchNorm layers if the batch per rank is below `SYNC_BELOW`; log one line on rank 0.

    It returns whether it did. All ranks call it, and agree on the smallest batch among them. Without such layers, or in
    a group of one rank, nothing happens.
    """
    num_layers = len(find_batchnorms(module))
    if not num_layers or group.size() == 1:
        return False
    size = batch_size(inputs)
    # The smallest batch is found by a maximum, so zero, from a rank that has no batch at all, decides nothing.
    below_unknown = torch.tensor(0 if size is None else _UNKNOWN - size, device=device)
    dist.all_reduce(below_unknown, op=dist.ReduceOp.MAX, group=group)
    smallest = _UNKNOWN - int(below_unknown)
    sync = decide_sync(smallest)
    if sync:
        span_ranks(module, group)
    if group.rank() != 0:
        return sync
    if sync:
        _logger.warning(
            'sync_batchnorm="auto": the smallest batch of a rank is %d, below %d, so the BatchNorm layers (%d) now '
            "normalize over the batches of all %d ranks. sync_batchnorm=False leaves them as they are.",
            smallest,
            SYNC_BELOW,
            num_layers,
            group.size(),
        )
    else:
        shown = "can't be seen in forward's arguments" if smallest == _UNKNOWN else f"is {smallest}"
        _logger.info(
            'sync_batchnorm="auto": the smallest batch of a rank %s, so the BatchNorm layers (%d) stay as they are.',
            shown,
            num_layers,
        )
    return sync
