"""A model with what makes slices hard: sizes that don't divide, channels_last, a scalar, a frozen one."""

import torch
from torch import nn

import phalanx


class Uneven(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last)
        self.hidden = nn.Linear(7 * 36, 41)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(50), requires_grad=False)
        self.head = nn.Linear(41, 3)

    def forward(self, images):
        hidden = torch.tanh(self.hidden(self.conv(images).flatten(1))) * self.scale + self.frozen[:41]
        return self.head(hidden)


def batch(rank, step):
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(ddp, rank, step):
    ddp(batch(rank, step)).square().mean().backward()


def train(ddp, optimizer, rank, steps, *, first=0, before_step=None):
    """Ordinary training; returns the parameters."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(ddp, rank, step)
        if before_step:
            before_step(ddp)
        optimizer.step()
    return values(ddp)


def values(module):
    return [p.detach().clone() for p in module.parameters()]


def wrapped(seed=0):
    return phalanx.DistributedDataParallel(Uneven(seed))


def same(these, those):
    return len(these) == len(those) and all(torch.equal(one, other) for one, other in zip(these, those, strict=True))
