"""How sums travel between hosts: as they are, or rounded to a shorter type and back."""

from __future__ import annotations

from collections import OrderedDict
from datetime import timedelta

import torch
from torch import Tensor

from phalanx.engines.engine import Pending

_MOST_RESIDUALS = 64


class Wire:
    """Rounds float32 to `dtype` on the way out. What is sent is also what the sender keeps, so all ranks end with the
    same bits: a partial sum is given away anyhow, and a finished one must be the same at home as abroad.

    With error feedback, what rounding took from a tensor is added to the same tensor the next time.
    Source: Seide et al. (2014), 1-bit SGD; Karimireddy et al. (2019), error feedback fixes SignSGD.
    """

    def __init__(self, dtype: torch.dtype | None, *, error_feedback: bool = False) -> None:
        self._dtype = dtype
        self._feedback = error_feedback
        self._residuals: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether tensors of `dtype` are shortened."""
        return self._dtype is not None and dtype == torch.float32

    def begin(self, buffer: Tensor, *, key: int) -> Tensor | None:
        """Add what the last time's rounding took from the tensor known as `key`; where to put this time's, if kept."""
        if not self._feedback:
            return None
        name = (key, buffer.numel())
        residual = self._residuals.pop(name, None)
        if residual is None:
            residual = torch.zeros_like(buffer)
        self._residuals[name] = residual
        if len(self._residuals) > _MOST_RESIDUALS:
            self._residuals.popitem(last=False)
        buffer.add_(residual)
        return residual.zero_()

    def shorten(self, view: Tensor, lost: Tensor | None) -> Tensor:
        """`view` in the wire's type; `view` becomes what arrives, and `lost` grows by the difference."""
        assert self._dtype is not None
        short = view.to(self._dtype)
        if lost is not None:
            lost.add_(view).sub_(short)
        view.copy_(short)
        return short

    def staging(self, view: Tensor) -> Tensor:
        """Where to receive what becomes `view`."""
        return torch.empty(view.numel(), dtype=self._dtype)


class Widening:
    """A receive in the wire's type that ends in `view`."""

    def __init__(self, pending: Pending, short: Tensor, view: Tensor) -> None:
        self._pending = pending
        self._short = short
        self._view = view

    def wait(self, timeout: timedelta) -> None:
        """Return when `view` holds what came."""
        self._pending.wait(timeout)
        self._view.copy_(self._short)
