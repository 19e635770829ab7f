"""The smallest training: wrap a small network, take one step of AdamW, say when that was done."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group(sys.argv[1])
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(8, 64)).sum().backward()
optimizer.step()
done = time.monotonic()  # one clock for all processes of a host
print(f"rank {os.environ['RANK']} done at {done:.6f}", flush=True)
dist.destroy_process_group()
