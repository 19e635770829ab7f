"""A run with a straggler made on purpose: rank 1 reads its samples from a "slow disk". The report names it.

phalanx run --nproc-per-node 2 --report runs/slow examples/report.py
phalanx run --nproc-per-node 2 --report runs/fixed examples/report.py --workers 2
phalanx report runs/slow runs/fixed --html runs/compare.html
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import phalanx

FEATURES, BATCH = 256, 32


class Slow(Dataset):
    """Samples that take `delay_s` each to read."""

    def __init__(self, samples: int, delay_s: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(samples, FEATURES, generator=generator)
        self.targets = (self.inputs[:, :8].sum(1) > 0).long()
        self.delay_s = delay_s

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.delay_s:
            time.sleep(self.delay_s)
        return self.inputs[index], self.targets[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=0, help="processes that read ahead")
    parser.add_argument("--delay", type=float, default=0.001, help="seconds that rank 1 takes to read a sample")
    options = parser.parse_args()

    job = phalanx.init()
    torch.manual_seed(0)
    data = Slow(options.samples, options.delay if job.rank == 1 else 0.0)
    sampler = phalanx.DistributedSampler(data)
    keep = options.workers > 0
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=options.workers, persistent_workers=keep)
    layers = (nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2))
    model = phalanx.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(options.epochs):
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
