"""`UpdateLoss` adds up the loss of an update, whose gradient is that of several batches."""

from __future__ import annotations

import torch
from torch import Tensor


class UpdateLoss:
    """The mean over replicas of `take()` is the mean loss over all samples of an update.

    Cost: a multiplication and an addition on the loss's device for each batch; none of it is waited for.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, loss: Tensor, share: float) -> None:
        """Add the loss of a batch that counts `share` in the update's gradient. One that does not count may be NaN."""
        part = loss.detach() * share if share else torch.zeros_like(loss)
        self._sum = part if self._sum is None else self._sum + part

    def take(self) -> Tensor:
        """Return this replica's part of the loss, and begin with the next update."""
        taken, self._sum = self._sum, None
        assert taken is not None
        return taken
