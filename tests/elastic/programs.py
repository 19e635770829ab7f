"""A training program that has state of every kind, and everything that each rank holds when it has ended."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tests.elastic.jobs import Job, Numbers
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import phalanx
from phalanx import elastic
from phalanx.elastic import group, points, step


@dataclass(frozen=True)
class Program:
    """Whether BatchNorm spans the ranks, and in how many commits ranks wait for each other in any case."""

    sync: bool = False
    trial: int = 100


class Keeper(nn.Module):
    """A layer with state of every kind; each changes what comes out, and differs from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: float = 0.0
        self.scale: dict[str, Any] = {"amax": torch.zeros(()), "count": 0}
        self.register_buffer("none", None)
        self.register_buffer("cache", torch.zeros(0, 8), persistent=False)
        self.register_buffer("typed", torch.zeros(8))
        self.register_buffer("one", torch.zeros(8))
        self.register_buffer("other", self.one)
        self.register_buffer("wide", torch.zeros(1).expand(8))
        self.noise = torch.Generator().manual_seed(dist.get_rank())

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.training:
            if not hasattr(self, "table"):
                self.register_buffer("table", torch.zeros(8))
            self.table = self.table * 0.5 + mean
            self.none = mean.clone() if self.none is None else self.none + mean
            self.cache = torch.cat([self.cache, mean[None]])
            self.typed = (self.typed.double() + mean) if self.typed.dtype == torch.float32 else self.typed + mean
            self.one += mean
            self.wide = (self.wide[:1] + mean[:1]).expand(8)
            self.scale = {"amax": torch.maximum(self.scale["amax"], mean.max()), "count": self.scale["count"] + 1}
            self.seen += float(mean.sum())
            x = x + 0.01 * torch.rand(8, generator=self.noise)
        for buffer in (self.table, self.none, self.typed, self.one, self.wide, self.other, self.cache.mean(0)):
            x = x + 0.01 * buffer.float()  # type: ignore[union-attr]
        return x + 0.001 * self.seen + 0.01 * self.scale["amax"]


class Metric:
    """Sums of this rank alone."""

    def __init__(self) -> None:
        self.total, self.history = torch.zeros(2), []

    def add(self, loss: Tensor) -> None:
        self.total = self.total + torch.stack([loss.detach(), torch.ones(())])
        self.history.append(loss.item())

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.history = state["total"], list(state["history"])


class GlobalSGD(torch.optim.SGD):
    """It has state that belongs to no parameter, as optimizers that count steps do; each step changes an option."""

    def step(self, closure: Any = None) -> Any:
        for options in self.param_groups:
            options["dampening"] = 0.5 * options["dampening"] + 0.1
        self.state["global"] = {"steps": self.state.get("global", {}).get("steps", 0) + 1, "ema": torch.ones(3)}
        return super().step(closure)


def train_program(job: Job, program: Program) -> dict[str, Any]:
    """Train on this rank, and return all that it holds."""
    group.TRIAL_STEPS = step.TRIAL_STEPS = program.trial  # type: ignore[misc]
    with phalanx.init(timeout=60.0):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Keeper(), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        spare = nn.Linear(8, 1)
        torch.manual_seed(100 + dist.get_rank())
        random.seed(dist.get_rank())
        sync = "auto" if program.sync else False
        ddp = phalanx.DistributedDataParallel(model, check=False, broadcast_buffers=False, sync_batchnorm=sync)
        optimizer = GlobalSGD(ddp.parameters(), lr=0.05, momentum=0.9)
        scheduler = ChainedScheduler([ExponentialLR(optimizer, 0.97), StepLR(optimizer, 3, 0.9)])
        first = model[:2]  # whose buffers keep their form
        average = AveragedModel(  # type: ignore[no-untyped-call]
            first, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        data = Numbers(job.samples)
        sampler = phalanx.DistributedSampler(data)
        loader = DataLoader(data, batch_size=job.batch, sampler=sampler)
        alias = torch.zeros(3)
        state: Any = elastic.State(
            model=ddp, spare=spare, optimizer=optimizer, scheduler=scheduler, sampler=sampler, average=average,
            metric=Metric(), running=0.0, losses=[], first=alias, second=alias,
        )  # fmt: skip
        model[0].register_forward_hook(lambda *_: job.strike("forward", state.step))
        model[-1].register_full_backward_hook(lambda *_: job.strike("backward", state.step))
        optimizer.register_step_post_hook(lambda *_: job.strike("updated", state.step))
        points.listen(lambda point: job.strike(point, state.step))

        @elastic.run(state)
        def train(state: Any) -> None:
            for _ in state.epochs(2):
                for ids, x, y in loader:
                    optimizer.param_groups[0]["weight_decay"] = 0.9 * optimizer.param_groups[0]["weight_decay"] + 0.01
                    loss = (ddp(x).squeeze(1) - y).pow(2).mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if state.step % 5 == 3:
                        job.strike("late", state.step)
                        dist.all_reduce(loss.detach().clone())
                    scheduler.step()
                    average.update_parameters(first)
                    state.metric.add(loss)
                    state.running = 0.9 * state.running + loss.item()
                    state.losses.append(ids.tolist())
                    state.first += 1
                    if state.step % 3 == 1:
                        random.random()
                        torch.rand(1)
                    if state.step == 2 and len(optimizer.param_groups) == 1:
                        optimizer.add_param_group({"params": list(spare.parameters()), "lr": 0.5})
                    state.commit()

        train(state)
        return describe(state, model, optimizer, scheduler, average)


def describe(state: Any, model: nn.Module, optimizer: Any, scheduler: Any, average: nn.Module) -> dict[str, Any]:
    """Everything that a rank holds."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keeper = next(layer for layer in model if isinstance(layer, Keeper))  # type: ignore[attr-defined]
    return {
        "state_dict": dict(model.state_dict()),
        "buffers": dict(model.named_buffers(remove_duplicate=False)),
        "optimizer": [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            [optimizer.state.get(p, {}) for p in parameters],
            {key: value for key, value in optimizer.state.items() if isinstance(key, str)},
        ],
        "scheduler": {k: v for k, v in scheduler.state_dict().items() if k != "_get_lr_called_within_step"},
        "values": dict(state._values),
        "metric": state.metric.state_dict(),
        "average": [average.state_dict(), dict(average.named_buffers())],
        "extra": keeper.scale,
        "attribute": keeper.seen,
        "generator": keeper.noise.get_state(),
        "tied": keeper.one is keeper.other,
        "alias": state.first is state.second,
        "random": torch.get_rng_state(),
        "python": random.getstate(),
        "trains": [layer.training for layer in model.modules()],
    }


def differences(mine: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two of them differ in a bit, a shape or a kind."""
    if isinstance(theirs, Tensor) and isinstance(mine, Tensor):
        same = (mine.shape, mine.dtype, mine.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        return [] if same and torch.equal(mine, theirs) else [path]
    if isinstance(theirs, dict) and isinstance(mine, dict):
        if mine.keys() != theirs.keys():
            return [f"{path}: {sorted(map(str, mine.keys() ^ theirs.keys()))}"]
        return [one for key in theirs for one in differences(mine[key], theirs[key], f"{path}.{key}")]
    if isinstance(theirs, (list, tuple)) and isinstance(mine, (list, tuple)):
        if len(mine) != len(theirs):
            return [f"{path}: {len(mine)} in place of {len(theirs)}"]
        return [one for i in range(len(theirs)) for one in differences(mine[i], theirs[i], f"{path}[{i}]")]
    return [] if mine == theirs else [f"{path}: {mine} in place of {theirs}"]
