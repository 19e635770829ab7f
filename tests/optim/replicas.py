"""k replicas in one process: what LocalSGD and DiLoCo compute, written down plainly."""

import copy

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


model = Replica  # as a task of tests.optim.averaging


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


@torch.no_grad()
def simulate(steps_of, sync_every, *, outer=False):
    """The values of all ranks at the end; rank r takes steps_of[r] steps, and who has finished counts once more."""
    models = [Replica() for _ in steps_of]
    optimizers = [inner_of(model) for model in models]
    anchor = Replica()  # the outer parameters
    outer_optimizer = outer_of(anchor)
    for begin in range(0, max(steps_of), sync_every):
        counting = [model for model, steps in zip(models, steps_of, strict=True) if steps > begin]
        for rank, steps in enumerate(steps_of):
            for step in range(begin, min(begin + sync_every, steps)):
                with torch.enable_grad():
                    train_step(models[rank], optimizers[rank], rank, step)
        means = [torch.stack(each).mean(0) for each in zip(*map(floats, counting), strict=True)]
        if outer:
            trained = [p for p in anchor.parameters() if p.requires_grad]
            for parameter, mean in zip(trained, means, strict=False):
                parameter.grad = parameter - mean
            outer_optimizer.step()
            means[: len(trained)] = [parameter.detach().clone() for parameter in trained]
        for model in models:
            tensors = [p for p in model.parameters() if p.requires_grad]
            tensors += [buffer for buffer in model.buffers() if buffer.is_floating_point()]
            for tensor, mean in zip(tensors, copy.deepcopy(means), strict=True):
                tensor.copy_(mean)
    return floats(models[0])
