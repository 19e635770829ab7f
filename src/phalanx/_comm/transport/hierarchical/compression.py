"""Round sums to a shorter type for sending between hosts, or send them unchanged."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from phalanx._base.core_numbers import AVG, SUM
from phalanx._base.log import get_logger, warn_once
from phalanx._comm.engines.engine import PendingMessage

_logger = get_logger(__name__)

# The fraction of the host's memory that each rank may use: eight ranks use at most half of the memory.
_SHARE = 1 / 16
# A tensor that was not reduced while all others were reduced this many times is not expected again.
_ROUNDS = 4


@dataclass
class _Residual:
    values: Tensor
    met: int  # the count of reductions when these values were last used


class Compression:
    """A `Compression` rounds float32 to `dtype` for sending.

    The sender replaces its own values by the rounded ones, so that all ranks end with bitwise identical results: a
    partial sum is not used again, and a finished sum must be the same on the sender and the receivers.

    With error feedback, the rounding error of a tensor is added to the same tensor the next time. The kept errors take
    at most `most_bytes`, by default a sixteenth of the host's memory. If there is no room, a tensor gets no feedback,
    with one warning, and only errors of tensors that are no longer reduced are evicted: a training loop reduces its
    tensors in a cycle, so evicting the oldest error would evict each before its next use.
    Source: Seide et al. (2014), 1-bit SGD; Karimireddy et al. (2019), error feedback fixes SignSGD.
    """

    def __init__(
        self, dtype: torch.dtype | None, *, error_feedback: bool = False, most_bytes: int | None = None
    ) -> None:
        self._dtype = dtype
        self._feedback = error_feedback
        self._most_bytes = _memory_bytes() if most_bytes is None else most_bytes
        self._num_met = 0
        self._num_bytes = 0
        self._residuals: OrderedDict[tuple[int, int], _Residual] = OrderedDict()  # the last used is at the end

    def rounds(self, dtype: torch.dtype, redop: int) -> bool:
        """Return whether a reduction in `dtype` is rounded: only sums and means are."""
        return self._dtype is not None and dtype == torch.float32 and redop in (SUM, AVG)

    def begin(self, buffer: Tensor, *, key: int) -> Tensor | None:
        """Add the last rounding error of tensor `key` to `buffer`; return memory for the new error, if it is kept."""
        if not self._feedback:
            return None
        name = (key, buffer.numel())
        self._num_met += 1
        residual = self._residuals.get(name)
        if residual is None:
            residual = self._keep(name, buffer)
            if residual is None:
                return None
        residual.met = self._num_met
        self._residuals.move_to_end(name)
        buffer.add_(residual.values)
        return residual.values.zero_()

    def _keep(self, name: tuple[int, int], buffer: Tensor) -> _Residual | None:
        """Allocate one more residual, evicting those no longer used; return None if there is no room."""
        nbytes = buffer.numel() * buffer.element_size()
        while self._residuals and self._num_bytes + nbytes > self._most_bytes:
            oldest, residual = next(iter(self._residuals.items()))
            if self._num_met - residual.met <= _ROUNDS * len(self._residuals):
                break
            del self._residuals[oldest]
            self._num_bytes -= residual.values.numel() * residual.values.element_size()
        if self._num_bytes + nbytes > self._most_bytes:
            warn_once(
                _logger,
                f"error_feedback: the rounding errors of {len(self._residuals)} tensors take {self._num_bytes} of at "
                f"most {self._most_bytes} bytes; further tensors are rounded without feedback.",
            )
            return None
        self._num_bytes += nbytes
        self._residuals[name] = residual = _Residual(torch.zeros_like(buffer), self._num_met)
        return residual

    def shorten(self, view: Tensor, lost: Tensor | None) -> Tensor:
        """Return `view` rounded for sending; write the rounded values back to `view`, and add the error to `lost`."""
        assert self._dtype is not None
        short = view.to(self._dtype)
        if lost is not None:
            lost.add_(view).sub_(short).nan_to_num_(0.0, 0.0, 0.0)  # inf - inf is NaN: an overflow leaves no error
        view.copy_(short)
        return short

    def staging(self, view: Tensor) -> Tensor:
        """Return memory in which to receive the rounded data for `view`."""
        return torch.empty(view.numel(), dtype=self._dtype, device="cpu")


class Widening:
    """A `Widening` is a receive of rounded data; `wait` converts the data to the type of `view`, and writes `view`."""

    def __init__(self, pending: PendingMessage, short: Tensor, view: Tensor) -> None:
        self._pending = pending
        self._short = short
        self._view = view

    def wait(self, timeout: timedelta) -> None:
        """Wait until `view` holds the received data."""
        self._pending.wait(timeout)
        self._view.copy_(self._short)


def _memory_bytes() -> int:
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _SHARE)
