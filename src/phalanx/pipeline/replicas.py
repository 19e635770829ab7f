"""Average the gradients of several pipelines that train the same model on different data, stage by stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET_BYTES = 25 * 1024 * 1024


class Replicas:
    """It averages over this stage's replicas, one in each pipeline; all begin with the first's values. All call it
    together.
    """

    def __init__(self, group: dist.ProcessGroup, parameters: Sequence[nn.Parameter], buffers: Iterable[Tensor]) -> None:
        self.group = group
        self._parameters = [p for p in parameters if p.requires_grad]
        with torch.no_grad():
            for tensor in (*parameters, *buffers):
                value = tensor.detach().contiguous()
                dist.broadcast(value, group=group, group_src=0)
                if value.data_ptr() != tensor.data_ptr():
                    tensor.copy_(value)

    def average(self) -> None:
        """Replace every gradient by its mean over the replicas.

        Cost: one all_reduce per 25 MiB, and one of a number per parameter. A parameter that no replica used has no
        gradient.
        """
        used = torch.tensor([float(p.grad is not None) for p in self._parameters])
        works = [dist.all_reduce(used, group=self.group, async_op=True)]
        buckets = []
        for bucket in _buckets(self._parameters):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(self.group.size())
            works.append(dist.all_reduce(flat, group=self.group, async_op=True))
            buckets.append((bucket, flat))
        for work in works:
            work.wait()
        is_used = {id(p): bool(count) for p, count in zip(self._parameters, used.tolist(), strict=True)}
        for bucket, flat in buckets:
            for parameter, part in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                if is_used[id(parameter)]:
                    if parameter.grad is None:
                        parameter.grad = part.view_as(parameter).clone()
                    else:
                        parameter.grad.copy_(part.view_as(parameter))


def _buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        nbytes = parameter.numel() * parameter.element_size()
        if not buckets or filled + nbytes > _BUCKET_BYTES or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += nbytes
    return buckets
