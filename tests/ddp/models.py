"""A small model and batches for it, for tests in which ranks have unequal numbers of batches."""

import torch
from torch import nn


def small_model(*, batchnorm=False):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(7) if batchnorm else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 7), middle, nn.Linear(7, 2))


def batch_of(rank, epoch, step):
    generator = torch.Generator().manual_seed(1000 * rank + 100 * epoch + step)
    return torch.randn(3, 5, generator=generator)
