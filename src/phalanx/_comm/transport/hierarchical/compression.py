"""Round sums to a shorter type for their way between hosts, or send them as they are."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from phalanx._base.log import get_logger, warn_once
from phalanx._comm.engines.engine import InTransit

_logger = get_logger(__name__)

# Each rank may take this part of the host's memory, so that eight ranks take at most half of it.
_SHARE = 1 / 16
# A tensor that has not come while so many times all others have is not expected any more.
_ROUNDS = 4


@dataclass
class _Residual:
    values: Tensor
    met: int  # the number of tensors at which it was last asked for


class Compression:
    """It rounds float32 to `dtype` on the way out.

    The sender also keeps what it sends, so all ranks end with the same bits: a partial sum is given away anyhow, and a
    finished one must be the same at home as abroad.

    With error feedback, what rounding took from a tensor is added to the same tensor the next time. What is kept takes
    at most `most_bytes`, by default a sixteenth of the host's memory. A tensor for which there is no room goes without,
    and that is said once: to forget the oldest for it would, where tensors come in turn, forget each before it comes.
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
        self._residuals: OrderedDict[tuple[int, int], _Residual] = OrderedDict()  # the one met last is at the end

    def rounds(self, dtype: torch.dtype) -> bool:
        return self._dtype is not None and dtype == torch.float32

    def begin(self, buffer: Tensor, *, key: int) -> Tensor | None:
        """Add to `buffer` what the last rounding took from tensor `key`; return where to put this one's, if kept."""
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
        """Make room for one more residual, instead of those long unused; return None if there is none."""
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
                f"error_feedback: what rounding took from {len(self._residuals)} tensors takes "
                f"{self._num_bytes} bytes, and no more than {self._most_bytes} are kept; further ones are rounded "
                "without feedback.",
            )
            return None
        self._num_bytes += nbytes
        self._residuals[name] = residual = _Residual(torch.zeros_like(buffer), self._num_met)
        return residual

    def shorten(self, view: Tensor, lost: Tensor | None) -> Tensor:
        """Return `view` in the type that is sent. `view` becomes what arrives, and `lost` grows by the difference."""
        assert self._dtype is not None
        short = view.to(self._dtype)
        if lost is not None:
            lost.add_(view).sub_(short)
        view.copy_(short)
        return short

    def staging(self, view: Tensor) -> Tensor:
        """Return the memory in which to receive what becomes `view`."""
        return torch.empty(view.numel(), dtype=self._dtype)


class Widening:
    """A `Widening` is a receive in the type that is sent; its end writes to `view`."""

    def __init__(self, pending: InTransit, short: Tensor, view: Tensor) -> None:
        self._pending = pending
        self._short = short
        self._view = view

    def wait(self, timeout: timedelta) -> None:
        """Wait until `view` holds what came."""
        self._pending.wait(timeout)
        self._view.copy_(self._short)


def _memory_bytes() -> int:
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _SHARE)
