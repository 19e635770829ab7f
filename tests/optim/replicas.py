"""k replicas in one process: what LocalSGD and DiLoCo compute, written down plainly."""

import torch
from tests.small_models import batch_of
from tests.training import train
from torch import nn

LR, MOMENTUM = 0.1, 0.9
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


class Replica(nn.Module):
    """With a scalar, a frozen parameter, channels_last strides, two dtypes and a floating buffer."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3).double()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, images):
        hidden = self.norm(self.conv(images).mean((2, 3))) * self.scale
        return self.head(hidden.double()) * self.frozen


def inner_of(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=MOMENTUM)


def outer_of(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **OUTER)


def train_step(model, optimizer, rank, step):
    train(model, optimizer, [batch_of(rank, step, shape=(5, 2, 5, 5))])


def floats(model):
    """All that rounds combine, copied: trained parameters, then floating buffers."""
    tensors = [p for p in model.parameters() if p.requires_grad]
    tensors += [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return [tensor.detach().clone() for tensor in tensors]
