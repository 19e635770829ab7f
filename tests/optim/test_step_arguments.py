"""`ZeroRedundancyOptimizer.step` takes a closure and whatever the optimizer inside takes, as PyTorch's does."""

import warnings

import pytest
import torch
from torch import nn

import phalanx
from phalanx.testing import run_ranks


class Scaled(torch.optim.SGD):
    def step(self, closure=None, *, scale=1.0):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=group["lr"] * scale)
        return loss


def _torchs(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own module compiles with torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(*args, **kwargs)


def _steps(rank, world_size, zero, arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = zero(model.parameters(), optimizer_class=Scaled, lr=0.1, **arguments)
    losses = []
    for step in range(3):

        def closure():
            optimizer.zero_grad()
            loss = model(torch.full((2, 4), step + 1.0)).square().sum()  # noqa: B023
            loss.backward()
            return loss.detach()

        losses.append(optimizer.step(closure, scale=0.5))
        closure()
        losses.append(optimizer.step(scale=0.25))
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("arguments", [{}, {"offload": True}], ids=["plain", "offload"])
def test_a_step_passes_its_arguments_on(arguments):
    """It was a TypeError."""
    theirs = run_ranks(_steps, 2, _torchs, {}, backend="gloo")
    ours = run_ranks(_steps, 2, phalanx.ZeroRedundancyOptimizer, arguments)
    torch.testing.assert_close(ours, theirs)
