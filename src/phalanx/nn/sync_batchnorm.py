"""`SyncBatchNorm` normalizes over the batches of all ranks; a class method converts a model's BatchNorm layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from phalanx._base.log import get_logger
from phalanx._base.torch_names import find
from phalanx._comm.backend.dynamo import untraced
from phalanx._comm.backend.shared import default_group, require_member

_logger = get_logger(__name__)
_TORCH_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_LOSES = "only PyTorch's own BatchNorm layers are converted to SyncBatchNorm"
_LazyNorm: Any = find("torch.nn.modules.batchnorm._LazyNormBase", loses=_LOSES, instead=())
if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm  # there is no public name for "any BatchNorm"
else:
    _BatchNorm = find("torch.nn.modules.batchnorm._BatchNorm", loses=_LOSES, instead=nn.BatchNorm1d)


class SyncBatchNorm(_BatchNorm):
    """Normalize by the statistics of all ranks' batches together during training.

    Replaces `torch.nn.SyncBatchNorm`, with its arguments and BatchNorm's keys in `state_dict()`, and also accepts CPU
    tensors. In eval mode, with one rank, and without a process group it behaves like `torch.nn.BatchNorm`.

    Shape: (N, C) or (N, C, ...); N may differ between ranks, and be zero.
    Cost: one all_gather of 2C + 1 numbers in forward, one all_reduce of 2C numbers in backward.
    Numerics: statistics are kept in float32 for half types and are bitwise identical on all ranks; P ranks, each with a
    part of the batch, train like one process with the whole batch, up to rounding. If all ranks' inputs are empty, the
    running statistics do not change.

    Raises:
        ValueError: the input has fewer than two dimensions or another number of channels, or all ranks together have
            only one value per channel (raised on all ranks).
        TypeError: the input is not real floating point.
        RuntimeError: backward with create_graph=True.

    Source: Ioffe and Szegedy (2015), Batch Normalization; Peng et al. (2018), MegDet, for its span over ranks.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        if not bias:  # not every supported version of torch has the argument
            self.register_parameter("bias", None)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm expects an input of at least 2 dimensions, got {input.dim()}")
        if input.shape[1] != self.num_features or not self.num_features:
            raise ValueError(
                f"SyncBatchNorm has {self.num_features} channels, but dimension 1 of the input of shape "
                f"{tuple(input.shape)} is {input.shape[1]}"
            )
        if not input.is_floating_point():
            raise TypeError(f"SyncBatchNorm expects a real floating point input, got {input.dtype}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input`; in training all ranks of the process group call it."""
        group = self._group() if self.training else None
        if group is None or group.size() == 1:
            return super().forward(input)
        return self._normalize_over(input, group)

    @untraced  # collectives' results decide the control flow, which torch.compile cannot trace
    def _normalize_over(self, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Normalize by the statistics of all ranks' inputs."""
        self._check_input_dim(input)
        counts = not is_uncounted()
        with torch.no_grad():
            statistics = gather_statistics(input if counts else input[:0], group)
            if statistics.count == 1:
                raise ValueError(
                    "SyncBatchNorm expects more than 1 value per channel when training: all ranks together have 1; on "
                    f"this rank the input has the shape {tuple(input.shape)}"
                )
            if self.track_running_stats:
                self._track(statistics)
        # apply has no type of its own
        return cast(Tensor, Normalize.apply(input, self.weight, self.bias, statistics, self.eps, group, counts))  # type: ignore[no-untyped-call]

    def _group(self) -> dist.ProcessGroup | None:
        if self.process_group is not None:
            require_member(self.process_group, "SyncBatchNorm")
            return self.process_group
        return default_group()

    def _track(self, statistics: BatchStatistics) -> None:
        """Update the running statistics, each of which may be None, with this step's statistics."""
        number = self.num_batches_tracked
        if number is not None:
            number.add_(1)
        if not statistics.count:
            return
        share = self.momentum
        if share is None:
            share = 0.0 if number is None else 1.0 / number.item()
        for running, new in (
            (self.running_mean, statistics.mean),
            (self.running_var, statistics.unbiased_variance),
        ):
            if running is not None:
                running.copy_(running.to(new.dtype) * (1.0 - share) + new * share)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Make every BatchNorm layer in `module` normalize over `process_group` (None: all ranks); return `module`.

        Layers are converted in place: parameters, parametrizations, buffers, hooks, the training flag and every
        reference to a layer are kept. `torch.nn.SyncBatchNorm` is converted as well. A layer whose class overrides
        `forward`, which a conversion would lose, is not converted, and a warning is logged.

        Raises:
            ValueError: a lazy layer has not seen its first input.
        """
        layers = find_batchnorms(module)
        lazy = [name for name, layer in layers.items() if isinstance(layer, _LazyNorm)]
        if lazy:
            raise ValueError(f"BatchNorm layer {lazy[0]!r} has no shape yet: run one forward of the module first")
        for name, layer in layers.items():
            if not _is_plain(layer):
                _logger.warning(
                    "convert_sync_batchnorm keeps layer %r: its class %s overrides forward, and the override "
                    "would be lost. The layer still normalizes each rank's batch separately.",
                    name,
                    type(layer).__qualname__,
                )
                continue
            layer.__class__ = _parametrized(cls, type(layer)) if is_parametrized(layer) else cls
            layer.process_group = process_group
        return module


def _parametrized(cls: type[nn.Module], before: type[nn.Module]) -> type[nn.Module]:
    """Return `cls` with the attributes that `torch.nn.utils.parametrize` adds to the class of a single layer."""
    own = {name: one for name, one in vars(before).items() if name not in ("__dict__", "__weakref__", "__doc__")}
    return type(f"Parametrized{cls.__name__}", (cls,), own)


def find_batchnorms(module: nn.Module) -> dict[str, Any]:
    """Return the BatchNorm layers of `module`, by dotted name, other than `SyncBatchNorm`."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, (_BatchNorm, *_TORCH_CLASSES)) and not isinstance(layer, SyncBatchNorm)
    }


def _is_plain(layer: nn.Module) -> bool:
    return type(layer).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)


# Per channel: the count, the mean and the squared deviations of a batch, on one rank and over several ranks.
#
# n      values per channel             n = sum of n_r
# mean   their mean                     mean = sum of n_r mean_r / n
# m2     sum of (x - mean)^2            m2 = sum of m2_r + n_r (mean_r - mean)^2        (index r: rank)
#
# Sums of squares are not used, because they lose all digits if the mean is much larger than the deviation.
#
# Source: Chan, Golub and LeVeque (1979), Updating formulae and a pairwise algorithm for computing sample variances.


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which statistics of `dtype` values are kept: float32 for half types, else `dtype` itself."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class BatchStatistics:
    """`BatchStatistics` are a batch's statistics for normalization.

    `mean` and `m2` have shape (C,); `count` is an integer.
    """

    count: float
    mean: Tensor
    m2: Tensor

    @property
    def variance(self) -> Tensor:
        """Return the biased variance, by which values are normalized."""
        return self.m2 / self.count

    @property
    def unbiased_variance(self) -> Tensor:
        """Return the unbiased variance, for running statistics. It needs a count above 1."""
        return self.m2 / (self.count - 1)


def measure(values: Tensor) -> Tensor:
    """Return the statistics of `values` (N, C, ...) as one message of 2C + 1 numbers: mean, m2, count; zeros if empty.

    Cost: reads `values` twice, and allocates nothing of their size.
    """
    dtype = _statistics_dtype(values.dtype)
    num_channels = values.shape[1]
    message = torch.zeros(2 * num_channels + 1, dtype=dtype, device=values.device)
    if values.numel():
        # Half types are read as they are; the dtype of the running statistics makes the kernel return float32.
        kept = torch.zeros(num_channels, dtype=dtype, device=values.device)
        mean, variance = torch.batch_norm_update_stats(values, kept, torch.ones_like(kept), 0.0)
        count = values.numel() // num_channels
        message[:num_channels] = mean
        message[num_channels:-1] = variance * count
        message[-1] = count
    return message


def combine(messages: Tensor) -> BatchStatistics:
    """Return the statistics of all ranks' values together, from `messages` (ranks, 2C + 1) of `measure`.

    Numerics: computed in float64 and in rank order, so all ranks get bitwise identical statistics.
    """
    dtype, num_channels = messages.dtype, messages.shape[1] // 2
    exact = messages.double()
    means, m2s, counts = exact[:, :num_channels], exact[:, num_channels:-1], exact[:, -1:]
    count = counts.sum().item()
    mean = (counts * means).sum(0) / max(count, 1.0)
    m2 = (m2s + counts * (means - mean).square()).sum(0)
    return BatchStatistics(count, mean.to(dtype), m2.to(dtype))


# Normalize a batch by the statistics of all ranks' batches: forward and backward.
#
# forward    x --> mean, m2, count --(all_gather of 2C + 1)--> statistics of all ranks --> y
# backward   x, dy --> sum of dy, sum of dy x^ --(all_reduce of 2C)--> of all ranks --> dx
#
# x^ = (x - mean) s        s = 1 / sqrt(variance + eps)        y = w x^ + b
#
# dx = w s (dy - [sum of dy] / n - x^ [sum of dy x^] / n)      [..]: over all ranks;  n: values per channel in all


def gather_statistics(values: Tensor, group: dist.ProcessGroup) -> BatchStatistics:
    """Return the statistics of all ranks' `values` (N, C, ...) together; N may differ between ranks, and be zero.

    Cost: one all_gather of 2C + 1 numbers.
    """
    mine = measure(values)
    messages = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(messages, mine, group=group)
    return combine(torch.stack(messages))


class Normalize(torch.autograd.Function):
    """`Normalize` computes y = w (x - mean) / sqrt(variance + eps) + b with statistics that depend on all ranks' x.

    Cost: one all_reduce of 2C numbers in backward, or none if x needs no gradient, which is the same on all ranks.
    Numerics: half types are computed in float32 and rounded once. Gradients of w and b are this rank's part, like the
    gradients of any parameter: DistributedDataParallel averages them.
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
        """Scale and shift `x` in one pass; `counts` is whether the statistics include `x`."""
        variance = statistics.variance if statistics.count else torch.ones_like(statistics.m2)
        ctx.save_for_backward(x, weight, statistics.mean, variance)
        ctx.count, ctx.eps, ctx.group = statistics.count, eps, group
        ctx.counts = counts and x.numel() > 0
        ctx.bias_dtype = None if bias is None else bias.dtype
        if not x.numel():
            return torch.empty_like(x)
        dtype = _statistics_dtype(x.dtype)
        scale = None if weight is None else weight.to(dtype)
        shift = None if bias is None else bias.to(dtype)
        return F.batch_norm(x, statistics.mean, variance, scale, shift, eps=eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, w and b, from sums over all ranks.

        Raises:
            RuntimeError: backward was called with create_graph=True.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "SyncBatchNorm: backward(create_graph=True) is refused, because sums over ranks cannot be "
                "differentiated. For a step that needs second derivatives, put the layer into evaluation mode, or keep "
                "torch.nn.BatchNorm, which normalizes each rank's batch separately."
            )
        x, weight, mean, variance = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        values, slopes = x.to(mean.dtype), dy.to(mean.dtype)
        scale = None if weight is None else weight.to(mean.dtype)
        if ctx.counts:
            # With the statistics treated as constants, one kernel computes the first term of dx and both sums.
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


# Per process, not per thread: autograd runs the recomputations of checkpointing on its own threads.
_open_marks: list[None] = []


@contextmanager
def uncounted_batch() -> Iterator[None]:
    """Mark the forward and backward inside as passes of a batch that does not count: its loss is multiplied by zero.

    A replica without samples takes part in a step with such a batch. Layers that span ranks take part in their
    collectives without values, so that other ranks' results are unaffected.
    """
    _open_marks.append(None)
    try:
        yield
    finally:
        _open_marks.pop()


def is_uncounted() -> bool:
    """Return whether the current forward is of a batch that does not count."""
    return bool(_open_marks)
