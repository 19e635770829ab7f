"""One rank's tensors, made everybody's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors  # torch's own DDP packs with them

_MESSAGE_BYTES = 32 * 1024 * 1024  # bounds the memory beside the model

Broadcast = Callable[[Tensor], bool]
"""Makes one rank's tensor everybody's; whether it may have been another rank's."""


def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup, src: int = 0) -> None:
    """Overwrite `tensors` on every rank with those of rank `src`, bit by bit."""

    def broadcast(packed: Tensor) -> bool:
        dist.broadcast(packed, group=group, group_src=src)
        return group.rank() != src

    replicate(tensors, broadcast)


def replicate(tensors: Iterable[Tensor], broadcast: Broadcast) -> None:
    """Overwrite `tensors` with those of whichever rank `broadcast` takes for the source, bit by bit.

    They travel as bytes, so one message carries any mixture of dtypes. Widest elements go first, which keeps each
    tensor's place in the message aligned for its dtype. Version counters stay as they are: autograd may have saved a
    buffer (batch norm in evaluation does) for a backward that is still to come.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor.data)
    for members in by_device.values():
        members.sort(key=_width)
        message: list[Tensor] = []
        num_bytes = 0
        for tensor in members:
            message.append(tensor)
            num_bytes += tensor.nbytes
            if num_bytes >= _MESSAGE_BYTES:
                _broadcast(message, broadcast)
                message, num_bytes = [], 0
        if message:
            _broadcast(message, broadcast)


def _width(tensor: Tensor) -> tuple[int, str]:
    """Widest first, and those of one dtype together."""
    return -tensor.dtype.itemsize, str(tensor.dtype)


def _broadcast(tensors: list[Tensor], broadcast: Broadcast) -> None:
    runs = [list(run) for _, run in itertools.groupby(tensors, key=_width)]  # torch packs tensors of one dtype at once
    parts = [_flatten_dense_tensors(run).view(torch.uint8) for run in runs]  # type: ignore[no-untyped-call]
    packed = parts[0] if len(parts) == 1 else torch.cat(parts)
    if not broadcast(packed):
        return
    for run, part in zip(runs, packed.split([part.numel() for part in parts]), strict=True):
        torch._foreach_copy_(run, _unflatten_dense_tensors(part.view(run[0].dtype), run))  # type: ignore[no-untyped-call]
