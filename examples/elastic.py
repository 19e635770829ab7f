"""Train a network, and lose ranks on the way: the others go on, and so do those in their place.

On two cores:  phalanx run --nproc-per-node 2 examples/elastic.py
and meanwhile: kill -9 of a rank, whose process number it prints
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx

parser = argparse.ArgumentParser(description="Train through the loss of ranks.")
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()
job = phalanx.init()
print(f"process {os.getpid()}", flush=True)
torch.manual_seed(0)
inputs = torch.randn(2048, 20)
data = TensorDataset(inputs, (inputs.square().sum(1) > 20).long())
sampler = phalanx.DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)
model = phalanx.DistributedDataParallel(
    nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(job.rank)  # each rank has a dropout of its own
state = phalanx.elastic.State(model=model, optimizer=optimizer, sampler=sampler, right=0.0)


@phalanx.elastic.run(state)
def train(state: phalanx.elastic.State) -> None:
    """Everything in here may be done again from the latest commit on; what is outside is done once a process."""
    for epoch in state.epochs(args.epochs):
        for x, y in loader:
            scores = model(x)
            loss = nn.functional.cross_entropy(scores, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.right = 0.9 * state.right + 0.1 * float((scores.argmax(1) == y).float().mean())
            state.commit()
        if job.is_main:
            print(f"epoch {epoch}: step {state.step}, {state.right:.1%} right", flush=True)


train(state)
if job.is_main:
    print(f"weights {sum(p.double().sum() for p in model.parameters()):.15f}")
