"""Compute count, mean and squared deviations of a batch per channel, and combine those of several batches.

    n      values per channel             n = sum of n_r
    mean   their mean                     mean = sum of n_r mean_r / n
    m2     sum of (x - mean)^2            m2 = sum of m2_r + n_r (mean_r - mean)^2        (index r: rank)

Deviations are combined, and not sums of squares: those lose all digits when the mean is large beside the deviation.

Source: Chan, Golub and LeVeque (1979), Updating formulae and a pairwise algorithm for computing sample variances.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
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
        """Return the biased variance, which normalizes."""
        return self.m2 / self.count

    @property
    def unbiased_variance(self) -> Tensor:
        """Return the unbiased variance, for running statistics. It needs a count above 1."""
        return self.m2 / (self.count - 1)


def measure(values: Tensor) -> Tensor:
    """Return the statistics of `values` (N, C, ...) as one message of 2C + 1 numbers: mean, m2, count; zeros if empty.

    Cost: it reads `values` twice, and writes nothing of their size.
    """
    dtype = statistics_dtype(values.dtype)
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

    Numerics: in float64 and in the order of ranks, so equal messages give equal bits.
    """
    dtype, num_channels = messages.dtype, messages.shape[1] // 2
    exact = messages.double()
    means, m2s, counts = exact[:, :num_channels], exact[:, num_channels:-1], exact[:, -1:]
    count = counts.sum().item()
    mean = (counts * means).sum(0) / max(count, 1.0)
    m2 = (m2s + counts * (means - mean).square()).sum(0)
    return BatchStatistics(count, mean.to(dtype), m2.to(dtype))
