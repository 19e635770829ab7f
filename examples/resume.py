"""Train, and be killed at any moment: the next start goes on from the latest checkpoint, as if nothing had happened.

Alone:         python examples/resume.py
On two cores:  phalanx run --nproc-per-node 2 examples/resume.py (or torchrun)
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.checkpoint import RandomState

parser = argparse.ArgumentParser(description="Train with checkpoints in the background.")
parser.add_argument("--folder", default="resume")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
args = parser.parse_args()
job = phalanx.init()
torch.manual_seed(0)
inputs = torch.randn(2000, 20)
data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
sampler = phalanx.DistributedSampler(data)
# Of its own, because a DataLoader draws a number when it begins, and one that resumes begins once more.
loader = DataLoader(data, batch_size=32 // job.world_size, sampler=sampler, generator=torch.Generator())
model = phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(job.rank)  # each process has a dropout of its own

parts = {"model": model, "optimizer": optimizer, "sampler": sampler, "random": RandomState()}
with phalanx.CheckpointManager(args.folder, keep=2) as manager:
    restored = manager.load(parts, fallback=True)
    step = restored.step if restored else 0
    if job.is_main:
        print(f"begins after step {step}", flush=True)
    while step < args.steps:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.every == 0:
                manager.async_save(step, parts)
                if job.is_main:
                    print(f"step {step}: loss {loss:.4f}", flush=True)
            if step == args.steps:
                break
    manager.save(step, parts)
if job.is_main:
    print(f"weights {sum(p.double().sum() for p in model.parameters()):.15f}")
