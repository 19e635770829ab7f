"""Train a small convolutional network on scikit-learn's handwritten digits.

Alone:         python examples/digits.py
On two cores:  phalanx run --nproc-per-node 2 examples/digits.py (or torchrun)
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import phalanx

parser = argparse.ArgumentParser(description="Train on handwritten digits.")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--checkpoint", default="digits.pt")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
args = parser.parse_args()
job = phalanx.init()
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [1497, 300])
sampler = phalanx.DistributedSampler(train)
train_loader = DataLoader(train, batch_size=32, sampler=sampler)
test_loader = DataLoader(test, batch_size=32, sampler=phalanx.DistributedSampler(test, padding=False))

convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
network = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(1024, 10))
model = phalanx.DistributedDataParallel(network)
torch.manual_seed(job.rank)  # each process has a dropout of its own
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
if args.resume:
    phalanx.load_checkpoint(args.checkpoint, into=parts)

for epoch in range(sampler.epoch, args.epochs):
    model.train()
    bar = phalanx.progress(train_loader, desc=f"epoch {epoch + 1}/{args.epochs}")
    for images, labels in bar:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.update(loss=loss)
    phalanx.save_checkpoint(args.checkpoint, {name: part.state_dict() for name, part in parts.items()})

model.eval()
right_and_seen = torch.zeros(2)
with torch.no_grad():
    for images, labels in test_loader:
        right_and_seen += torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
dist.all_reduce(right_and_seen)
if job.is_main:
    print(f"test accuracy {right_and_seen[0] / right_and_seen[1]:.4f} on {right_and_seen[1]:.0f} digits")
