"""One training script, every way of distributing it: change one word.

    python examples/strategies.py                        "auto": looks at this machine and takes one
    python examples/strategies.py mirrored               a rank for each core (the script starts itself again)
    python examples/strategies.py pipeline               the layers in stages on the ranks
    phalanx run --nproc-per-node 2 examples/strategies.py sharded

or single_device, multi_worker_mirrored, parameter_server, local_sgd, diloco.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from phalanx import strategies

parser = argparse.ArgumentParser(description="Train on handwritten digits under a strategy.")
parser.add_argument("strategy", nargs="?", default="auto", choices=["auto", *strategies.STRATEGIES])
parser.add_argument("--epochs", type=int, default=8)
args = parser.parse_args()

torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
order = torch.randperm(len(images))
images, labels = images[order], labels[order]

strategy = strategies.get(args.strategy)
with strategy.scope():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
strategy.setup(model, torch.optim.AdamW(model.parameters(), lr=2e-3), F.cross_entropy)

replicas = strategy.num_replicas_in_sync
batch_size = -(-48 // replicas) * replicas  # over all replicas, which share it evenly
loader = strategy.loader(TensorDataset(images[:-300], labels[:-300]), batch_size)
for epoch in range(args.epochs):
    for batch in loader:
        loss = strategy.step(*batch)
    loss = strategy.reduce("mean", loss)
    if strategy.is_main:
        print(f"epoch {epoch + 1}: loss {loss:.6f}", flush=True)

strategy.finish()  # replicas that train apart (local_sgd, ...) come together
result = strategy.evaluate(images[-300:])  # None where another rank has it
if result is not None and strategy.replica_id_in_sync_group == 0:  # one rank prints: the last stage's in a pipeline
    accuracy = (result.argmax(1) == labels[-300:]).float().mean()
    print(
        f"{type(strategy).__name__}, {strategy.num_replicas_in_sync} replicas: test accuracy {accuracy:.4f}", flush=True
    )
strategy.close()
