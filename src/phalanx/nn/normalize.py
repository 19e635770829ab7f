"""Normalize a batch by the statistics of all ranks' batches: forward and backward.

forward    x --> mean, m2, count --(all_gather of 2C + 1)--> statistics of all ranks --> y
backward   x, dy --> sum of dy, sum of dy x^ --(all_reduce of 2C)--> of all ranks --> dx

x^ = (x - mean) s        s = 1 / sqrt(variance + eps)        y = w x^ + b

dx = w s (dy - [sum of dy] / n - x^ [sum of dy x^] / n)      [..]: over all ranks;  n: values per channel in all
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.nn.batch_statistics import BatchStatistics, combine, measure, statistics_dtype


def gather_statistics(values: Tensor, group: dist.ProcessGroup) -> BatchStatistics:
    """Return the statistics of all ranks' `values` (N, C, ...) together; ranks may have different N, and zero.

    Cost: one all_gather of 2C + 1 numbers.
    """
    mine = measure(values)
    messages = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(messages, mine, group=group)
    return combine(torch.stack(messages))


class Normalize(torch.autograd.Function):
    """It computes y = w (x - mean) / sqrt(variance + eps) + b with statistics that depend on x of all ranks.

    Cost: backward is one all_reduce of 2C numbers; there is none when x needs no gradient, on all ranks alike.
    Numerics: half types are computed in float32 and rounded once. Gradients of w and b are this rank's part, as those
    of any parameter: DistributedDataParallel averages them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: BatchStatistics,
        eps: float,
        group: dist.ProcessGroup,
        counts: bool,
    ) -> Tensor:
        """Scale and shift `x`, in one pass; `counts` says whether the statistics are of it, too."""
        variance = statistics.variance if statistics.count else torch.ones_like(statistics.m2)
        ctx.save_for_backward(x, weight, statistics.mean, variance)
        ctx.count, ctx.eps, ctx.group = statistics.count, eps, group
        ctx.counts = counts and x.numel() > 0
        ctx.bias_dtype = None if bias is None else bias.dtype
        if not x.numel():
            return torch.empty_like(x)
        dtype = statistics_dtype(x.dtype)
        scale = None if weight is None else weight.to(dtype)
        shift = None if bias is None else bias.to(dtype)
        return F.batch_norm(x, statistics.mean, variance, scale, shift, eps=eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, w and b, from sums over all ranks.

        Raises:
            RuntimeError: it was called with create_graph=True.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "SyncBatchNorm: backward(create_graph=True) is refused, because sums over ranks can't be "
                "differentiated. For a step that needs second derivatives put the layer into evaluation mode, or keep "
                "torch.nn.BatchNorm, which normalizes each rank's batch by itself."
            )
        x, weight, mean, variance = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        values, slopes = x.to(mean.dtype), dy.to(mean.dtype)
        scale = None if weight is None else weight.to(mean.dtype)
        if ctx.counts:
            # With statistics that are held to be constant this is dx's first term, and both sums, in one kernel.
            dx, sum_dy_xhat, sum_dy = torch.ops.aten.native_batch_norm_backward(
                slopes, values, scale, mean, variance, None, None, False, ctx.eps, [needs_x, True, True]
            )
        else:
            dx, sum_dy_xhat, sum_dy = torch.zeros_like(values), torch.zeros_like(mean), torch.zeros_like(mean)
        grad_weight = sum_dy_xhat.to(weight.dtype) if weight is not None and needs_weight else None
        grad_bias = sum_dy.to(ctx.bias_dtype) if needs_bias else None
        if not needs_x:
            return None, grad_weight, grad_bias, None, None, None, None
        sums = torch.cat([sum_dy, sum_dy_xhat])
        dist.all_reduce(sums, group=ctx.group)
        if ctx.counts:
            total_dy, total_dy_xhat = (sums / ctx.count).chunk(2)
            s = torch.rsqrt(variance + ctx.eps)
            factor = s if scale is None else s * scale
            shape = [1, -1] + [1] * (x.dim() - 2)
            dx.addcmul_(values - mean.view(shape), (-factor * s * total_dy_xhat).view(shape))
            dx.sub_((factor * total_dy).view(shape))
        return dx.to(x.dtype), grad_weight, grad_bias, None, None, None, None
