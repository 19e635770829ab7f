"""Models, batches and what their gradients must be, for several files of tests each."""

import torch
from torch import nn


def small_model(*, batchnorm=False):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(7) if batchnorm else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 7), middle, nn.Linear(7, 2))


def batch_of(rank, epoch, step):
    """Return a rank's inputs, where ranks have unequal numbers of batches in an epoch."""
    generator = torch.Generator().manual_seed(1000 * rank + 100 * epoch + step)
    return torch.randn(3, 5, generator=generator)


def wide_model(width):
    """Return a model whose first two weights are width x width: large ones are reduced where autograd wrote them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 3))


def mean_gradients(model, batches):
    """Return the gradients of the mean loss over all ranks' batches, made by one process."""
    (sum(model(batch).square().mean() for batch in batches) / len(batches)).backward()
    return [parameter.grad for parameter in model.parameters()]
