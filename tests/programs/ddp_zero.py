"""Phalanx's DistributedDataParallel with the sharded optimizer: the weights of one process over the whole batches."""

import torch
from torch import nn

import phalanx


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3)).double()


torch.manual_seed(1)
inputs, targets = torch.randn(120, 10, dtype=torch.float64), torch.randn(120, 3, dtype=torch.float64)
data = torch.utils.data.TensorDataset(inputs, targets)
job = phalanx.init()

model = phalanx.DistributedDataParallel(make_model())
optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
sampler = phalanx.DistributedSampler(data, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=12 // job.world_size, sampler=sampler)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

alone = make_model()
optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
for x, y in torch.utils.data.DataLoader(data, batch_size=12):
    optimizer.zero_grad()
    nn.functional.mse_loss(alone(x), y).backward()
    optimizer.step()
torch.testing.assert_close(dict(model.module.named_parameters()), dict(alone.named_parameters()))
print("right")
