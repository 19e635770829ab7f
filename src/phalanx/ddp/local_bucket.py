"""A `LocalBucket` serves a rank that is alone in its group: the mean over the ranks is what autograd wrote."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.ddp.bucket import check_gradient
from phalanx.ddp.holders import separate_gradient
from phalanx.ddp.plan import Bucket


class LocalBucket:
    """A `LocalBucket` has no memory of its own: gradients stay where autograd wrote them, and nothing is sent.

    It refuses what the buckets of several ranks refuse, so that a model that trains on one rank trains on more.
    """

    may_stay_in_place = True

    def __init__(self, plan: Bucket, parameters: Sequence[Tensor]) -> None:
        self.plan = plan
        self.parameters = list(parameters)

    def fill(self, scale: float, written: Sequence[bool]) -> None:
        """Check that each gradient is what was planned.

        Raises:
            RuntimeError: a gradient does not fit.
        """
        for parameter, slot in zip(self.parameters, self.plan.slots, strict=True):
            if parameter.grad is not None:
                check_gradient(parameter.grad, parameter, self.plan, slot)

    def publish(self, position: int) -> None:
        """Leave the gradient in memory of its own; make it zeros if it was used and got none, as with several ranks."""
        parameter = self.parameters[position]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            self.separate(position)

    def separate(self, position: int) -> None:
        """Move a gradient that autograd has made out of memory that others hold as well."""
        separate_gradient(self.parameters[position])

    def adopt(self, position: int, grad: Tensor | None) -> None:
        """Do nothing: the gradient stays where it is."""

    def rescale(self, factor: float) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    weigh = rescale
