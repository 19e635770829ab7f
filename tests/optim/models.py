"""A model with what makes slices hard: sizes that don't divide, channels_last, a scalar, a frozen one."""

import torch
from tests.small_models import batch_of
from tests.training import copy_parameters
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
    return batch_of(rank, step, shape=(4, 3, 8, 8))


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
    return copy_parameters(ddp)


def wrapped(seed=0):
    return phalanx.DistributedDataParallel(Uneven(seed))
