"""phalanx.Pipeline in two stages with an optimizer on each: the weights of the uncut model."""

import torch
from torch import nn

import phalanx


def make_model():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(8, 2)).double()


torch.manual_seed(1)
inputs, targets = torch.randn(5, 16, 8, dtype=torch.float64), torch.randn(5, 16, 2, dtype=torch.float64)
job = phalanx.init()
pipe = phalanx.Pipeline(make_model(), micro_batches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
for x, y in zip(inputs, targets, strict=True):
    optimizer.zero_grad()
    pipe.step(x, target=y)
    optimizer.step()

alone = make_model()
optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
for x, y in zip(inputs, targets, strict=True):
    optimizer.zero_grad()
    nn.functional.mse_loss(alone(x), y).backward()
    optimizer.step()
torch.testing.assert_close(dict(pipe.state_dict()), dict(alone.state_dict()))
print("right")
