"""One rank of one contestant: trains for ever, and tells how long each stretch of steps took.

contestant.py NAME STEPS    a line on standard input begins a stretch; its seconds go to descriptor PHALANX_RESULTS
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH = int(os.environ.get("PHALANX_WIDTH", "768"))
BATCH, SAMPLES, WARMUP = (64, 6400, 6) if WIDTH > 64 else (4, 4000, 6)
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Stretches:
    """Counts steps, and waits for the word between two stretches."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._step = self._begun = -WARMUP
        self._results = os.fdopen(int(os.environ["PHALANX_RESULTS"]), "w", buffering=1)

    def count(self, loss: torch.Tensor) -> None:
        """After each step."""
        self._step += 1
        if self._step == self._num_steps:
            print(time.perf_counter() - self._begun, file=self._results)
        if self._step in (0, self._num_steps):
            if self._step == 0:
                print(float(loss), file=self._results)  # all contestants train alike
            if not sys.stdin.readline():
                os._exit(0)
            self._step, self._begun = 0, time.perf_counter()


def build() -> nn.Module:
    """A perceptron whose step takes some ten milliseconds."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
    )


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return TensorDataset(inputs, inputs.flip(1))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def make_loader(data: TensorDataset) -> DataLoader[Any]:
    """Of this rank; each has the same share in each batch, in order."""
    sampler: Any = DistributedSampler(data, WORLD_SIZE, RANK, shuffle=False) if WORLD_SIZE > 1 else None
    return DataLoader(data, BATCH, sampler=sampler)


def loop(stretches: Stretches) -> None:
    """The bare loop, with the wrapper that the Trainer uses."""
    import phalanx

    model = build()
    if WORLD_SIZE > 1:
        phalanx.init()
        model = phalanx.DistributedDataParallel(model)
    optimizer, loader = adamw(model.parameters()), make_loader(make_data())
    for _ in itertools.count():
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            stretches.count(loss.detach())


def fabric(stretches: Stretches) -> None:
    """Lightning Fabric's loop."""
    from lightning_fabric import Fabric

    one = Fabric(accelerator="cpu", devices=WORLD_SIZE, strategy="ddp" if WORLD_SIZE > 1 else "auto")
    one.launch()
    model = build()
    model, optimizer = one.setup(model, adamw(model.parameters()))
    loader = one.setup_dataloaders(DataLoader(make_data(), BATCH))
    for _ in itertools.count():
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            one.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            stretches.count(loss.detach())


def accelerate(stretches: Stretches) -> None:
    """Accelerate's loop."""
    from accelerate import Accelerator

    one = Accelerator(cpu=True)
    model = build()
    model, optimizer, loader = one.prepare(model, adamw(model.parameters()), DataLoader(make_data(), BATCH))
    for _ in itertools.count():
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            one.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            stretches.count(loss.detach())


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"bare loop": loop, "Fabric": fabric, "Accelerate": accelerate}[sys.argv[1]](Stretches(int(sys.argv[2])))
