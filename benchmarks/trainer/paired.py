"""One rank that trains by several loops in turns, in one process: in each round a block of steps by each.

paired.py NAMES STEPS ROUNDS SEED    JSON to descriptor PHALANX_RESULTS: by loop (wall, processor) of a step per round

On one rank all loops train the same parameters with the same optimizer's state, so that where these lie in memory (and
whether in large pages), the core and its clock are the same for each. On several ranks each loop has its own, as one
parameter has one reducer. The Trainer leads, and lets the others take their turns from its `on_step_end`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from contestant import BATCH, RANK, WORLD_SIZE, adamw, build, make_data, make_loader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import phalanx
from phalanx.trainer import Callback

AGAIN = " again"  # behind a name: the same loop once more, of which the ratio must be 1
Steps = Iterator[None]


def make_model(shared: nn.Module | None) -> nn.Module:
    """A model; with the parameters of `shared` if there is one, and none of its hooks."""
    model = build()
    if shared is not None:
        for mine, its in zip(model, shared, strict=True):  # type: ignore[arg-type]
            for name, parameter in its.named_parameters():
                setattr(mine, name, parameter)
    return model


def make_optimizer(model: nn.Module, shared: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """An optimizer; with the state of `shared` if there is one."""
    optimizer = adamw(model.parameters())
    if shared is not None:
        optimizer.state = shared.state
    return optimizer


def bare(shared_model: nn.Module | None, shared_optimizer: torch.optim.Optimizer | None) -> Steps:
    """The bare loop, with the wrapper that the Trainer uses."""
    model = make_model(shared_model)
    optimizer = make_optimizer(model, shared_optimizer)
    if WORLD_SIZE > 1:
        model = phalanx.DistributedDataParallel(model)
    loader = make_loader(make_data())
    while True:
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def fabric(shared_model: nn.Module | None, shared_optimizer: torch.optim.Optimizer | None) -> Steps:
    """Lightning Fabric's loop."""
    from lightning_fabric import Fabric

    one = Fabric(accelerator="cpu", devices=1)
    one.launch()
    bare_model = make_model(shared_model)
    model, optimizer = one.setup(bare_model, make_optimizer(bare_model, shared_optimizer))
    loader = one.setup_dataloaders(DataLoader(make_data(), BATCH))
    while True:
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            one.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield


def accelerate(shared_model: nn.Module | None, shared_optimizer: torch.optim.Optimizer | None) -> Steps:
    """Accelerate's loop."""
    from accelerate import Accelerator

    one = Accelerator(cpu=True)
    bare_model = make_model(shared_model)
    model, optimizer, loader = one.prepare(
        bare_model, make_optimizer(bare_model, shared_optimizer), DataLoader(make_data(), BATCH)
    )
    while True:
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            one.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield


LOOPS: dict[str, Callable[..., Steps]] = {"bare loop": bare, "Fabric": fabric, "Accelerate": accelerate}


class Turns(Callback):
    """From each block of the Trainer's steps to the next the other loops have theirs."""

    def __init__(self, names: list[str], steps: int, rounds: int, seed: int) -> None:
        self._names, self._steps, self._rounds = names, steps, rounds
        self._draw = random.Random(seed)
        self._loops: dict[str, Steps] = {}
        self._count = -1
        self._begun = (0.0, 0.0)
        self.seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ["Trainer", *names]}

    def on_step_end(self, trainer: phalanx.Trainer, loss: torch.Tensor) -> None:
        """Count; at the end of a block the others' turn."""
        self._count += 1
        if not self._loops:
            shares = (trainer.strategy.bare_model, trainer.optimizer) if WORLD_SIZE == 1 else (None, None)
            self._loops = {name: LOOPS[name.removesuffix(AGAIN)](*shares) for name in self._names}
            self._count = self._steps  # the first round is for warming up
            self._begun = _now()
        if self._count < self._steps:
            return
        self.seconds["Trainer"].append(_since(self._begun))
        for name in self._draw.sample(self._names, len(self._names)):
            begun = _now()
            for _ in range(self._steps):
                next(self._loops[name])
            self.seconds[name].append(_since(begun))
        if len(self.seconds["Trainer"]) == self._rounds + 2:  # of which the first was no block, and the second cold
            trainer.stop("all rounds are done")
        self._count, self._begun = 0, _now()


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(begun: tuple[float, float]) -> tuple[float, float]:
    wall, processor = _now()
    return wall - begun[0], processor - begun[1]


def main() -> None:
    """Train, and tell."""
    names, steps, rounds, seed = sys.argv[1].split(","), *map(int, sys.argv[2:5])
    torch.set_num_threads(1)
    if len(os.sched_getaffinity(0)) >= WORLD_SIZE:  # a core for each rank, the same one for all of its loops
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[RANK]})
    turns = Turns(names, steps, rounds, seed)
    trainer = phalanx.Trainer(
        build(),
        adamw,
        F.mse_loss,
        strategy="mirrored" if WORLD_SIZE > 1 else "single_device",
        max_epochs=10**6,
        callbacks=[turns],
    )
    trainer.fit(DataLoader(make_data(), BATCH * WORLD_SIZE))
    told: Any = {name: [[one / steps for one in pair] for pair in pairs[2:]] for name, pairs in turns.seconds.items()}
    with os.fdopen(int(os.environ["PHALANX_RESULTS"]), "w") as results:
        results.write(json.dumps(told))


if __name__ == "__main__":
    main()
