"""The same in ten lines: phalanx.Trainer saves, resumes, validates, and goes on when a rank is lost.

    python examples/trainer.py                               on all cores
    phalanx run --nproc-per-node 2 examples/trainer.py       kill a rank of it: it goes on

End it (Ctrl-C) and start it again: it goes on where it was. Remove the folder `trainer-run` to begin anew.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.trainer import EarlyStopping

parser = argparse.ArgumentParser(description="Train on handwritten digits with a Trainer.")
parser.add_argument("--strategy", default="auto")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--checkpoint", default="trainer-run")
args = parser.parse_args()


def accuracy(result, labels):
    """For each sample."""
    return (result.argmax(1) == labels).float()


torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
order = torch.randperm(len(images))
images, labels = images[order], labels[order]
model = nn.Sequential(
    nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
)

trainer = phalanx.Trainer(
    model,
    lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
    F.cross_entropy,
    strategy=args.strategy,
    max_epochs=args.epochs,
    checkpoint=args.checkpoint,
    metrics={"accuracy": accuracy},
    callbacks=[EarlyStopping("accuracy", patience=4, mode="max")],
    seed=0,
)
replicas = trainer.strategy.num_replicas_in_sync
batch_size = -(-48 // replicas) * replicas  # over all replicas, which share it evenly
trainer.fit(
    DataLoader(TensorDataset(images[:-300], labels[:-300]), batch_size, shuffle=True),
    DataLoader(TensorDataset(images[-300:], labels[-300:]), batch_size),
)
if trainer.strategy.is_main:
    print(
        f"epoch {trainer.epoch}, step {trainer.step}: test accuracy {trainer.metrics.get('accuracy', 0):.4f}",
        flush=True,
    )
trainer.strategy.close()
