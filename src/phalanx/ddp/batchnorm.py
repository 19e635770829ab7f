"""Decide whether BatchNorm layers normalize over all ranks' batches, and convert them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx._base.log import get_logger
from phalanx.nn.sync_batchnorm import SyncBatchNorm, find_batchnorms

SYNC_BELOW = 16
"""The batch size per rank below which "auto" considers the statistics of one rank's batch too noisy.

Wu and He (2018), Group Normalization, table 2: ResNet-50's error on ImageNet with BatchNorm is 23.6% with 32 samples
per worker, 23.7% with 16, and then 24.8% with 8, 27.3% with 4 and 34.7% with 2.
"""

_UNKNOWN = 2**62  # the size of an unknown batch: above every threshold, so that it decides nothing

SyncChoice = Literal["auto"] | bool

_logger = get_logger(__name__)


def check_choice(choice: object) -> None:
    """Check that `choice` is True, False or "auto".

    Raises:
        ValueError: `choice` is something else.
    """
    if not (choice is True or choice is False or choice == "auto"):
        raise ValueError(f'sync_batchnorm must be True, False or "auto", got {choice!r}')


def batch_size(inputs: Iterable[Tensor]) -> int | None:
    """Return the size of dimension 0 of the first input tensor that has dimensions; None if no tensor has any."""
    return next((tensor.shape[0] for tensor in inputs if tensor.dim()), None)


def decide_sync(smallest_batch: int) -> bool:
    """Return whether layers should normalize over all ranks, if the smallest batch of a rank is `smallest_batch`."""
    return smallest_batch < SYNC_BELOW


def span_ranks(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Convert the BatchNorm layers of `module`, in place, to normalize over `group`."""
    # A layer with a group cannot be copied or pickled, so the default group is not stored.
    SyncBatchNorm.convert_sync_batchnorm(module, None if group is dist.group.WORLD else group)


def sync_if_small(module: nn.Module, inputs: Iterable[Tensor], group: dist.ProcessGroup, device: torch.device) -> bool:
    """Convert the module's BatchNorm layers if any rank's batch is below `SYNC_BELOW`; log one line on rank 0.

    Return whether the layers were converted. All ranks call it, and agree on the smallest batch of any rank. Do nothing
    without BatchNorm layers, or in a group of one rank.
    """
    num_layers = len(find_batchnorms(module))
    if not num_layers or group.size() == 1:
        return False
    size = batch_size(inputs)
    # The maximum of `_UNKNOWN - size` finds the smallest batch. A rank without a batch sends 0, which decides nothing.
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
        shown = "cannot be determined from forward's arguments" if smallest == _UNKNOWN else f"is {smallest}"
        _logger.info(
            'sync_batchnorm="auto": the smallest batch of a rank %s, so the BatchNorm layers (%d) stay as they are.',
            shown,
            num_layers,
        )
    return sync
