"""Train a perceptron for three steps, as a script of a launcher does, then stand still until the job is ended.

It takes a contestant's name, a backend and the perceptron's width. torch.optim is in `contestants`.
"""

import signal
import sys

import torch
import torch.distributed as dist
from contestants import CONTESTANTS, perceptron

name, backend, width = sys.argv[1:]
contestant = CONTESTANTS[name]
dist.init_process_group(backend)
model = contestant.wrap(perceptron(int(width)))
optimizer = contestant.optimizer(model.parameters())
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(3):
    optimizer.zero_grad()
    inputs, targets = torch.randn(2, 8, 1024, generator=generator)
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
dist.barrier()
print(f"rank {dist.get_rank()} stands still", flush=True)
signal.pause()
