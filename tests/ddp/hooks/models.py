"""What the tests of hooks train: several buckets, and all that makes one awkward."""

import torch
from tests.small_models import batch_of
from torch import nn


class Awkward(nn.Module):
    """A channels_last convolution, a scalar, a parameter without elements, sizes that do not divide."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.hidden = nn.Linear(128, 41)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(41, 3)
        self.to(dtype)

    def forward(self, images):
        hidden = torch.tanh(self.hidden(self.conv(images).flatten(1))) * self.scale
        return self.head(hidden) + self.empty.sum(0)


def backward(ddp, rank, step):
    images = batch_of(rank, step, shape=(4, 3, 6, 6)).to(next(ddp.parameters()).dtype)
    ddp(images).square().mean().backward()


def gradients(ddp):
    return {name: p.grad.clone() for name, p in ddp.named_parameters()}
