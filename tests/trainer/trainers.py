"""Small trainers, and what they leave."""

import torch
from torch import nn
from torch.nn import functional as F

import phalanx
from phalanx import strategies


def make_model(dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))


def make(model=None, **options):
    if "strategy" not in options:
        options["strategy"] = strategies.SingleDeviceStrategy("cpu")
    options = {"show_progress": False} | options
    return phalanx.Trainer(model or make_model(), lambda p: torch.optim.AdamW(p, lr=1e-2), F.mse_loss, **options)


def weights(trainer):
    return torch.cat([one.detach().flatten() for one in trainer.strategy.bare_model.state_dict().values()])


class WithSteps(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(6, 1)

    def forward(self, inputs):
        return self.layer(inputs)

    def training_step(self, batch):
        inputs, targets = batch
        return F.mse_loss(self(inputs), targets)

    def validation_step(self, batch):
        inputs, targets = batch
        return {"off": (self(inputs) - targets).abs()}
