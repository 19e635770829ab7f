"""Training programs of parts that can be combined at will, and everything that each rank holds when one has ended."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tests.elastic.jobs import Job, Numbers, strike_when_done
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.optim import adam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import phalanx
from phalanx import elastic
from phalanx.elastic import group, points, step

LAYERS = ("norm", "late", "growing", "none first", "retyped", "tied", "extra", "attribute", "generator", "expanded")
LOOPS = ("late reduce", "own value", "equal value", "own list", "metric", "average", "average of buffers", "alias")
MORE = (
    "chained",
    "new group",
    "scaler",
    "accumulate",
    "validation",
    "late draw",
    "seldom draw",
    "hook",
    "second",
    "workers",
)


@dataclass(frozen=True)
class Program:
    """Which layers, which optimizer, and what the loop does besides."""

    layers: tuple[str, ...] = ("norm",)
    does: tuple[str, ...] = ()
    optimizer: str = "sgd"
    wrapper: str = "phalanx"
    dropout: float = 0.2
    epochs: int = 2
    trial: int = 100  # commits in which ranks wait for each other in any case


class Keeper(nn.Module):
    """A layer with state of every kind; each changes what comes out, and differs from rank to rank."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self.seen: float = 0.0
        self.calls = 0
        self.scale: dict[str, Any] = {"amax": torch.zeros(()), "count": 0}
        if "none first" in kinds:
            self.register_buffer("none", None)
        if "growing" in kinds:
            self.register_buffer("cache", torch.zeros(0, 8), persistent=False)
        if "retyped" in kinds:
            self.register_buffer("typed", torch.zeros(8))
        if "tied" in kinds:
            self.register_buffer("one", torch.zeros(8))
            self.register_buffer("other", self.one)
        if "expanded" in kinds:
            self.register_buffer("wide", torch.zeros(1).expand(8))
        self.noise = torch.Generator().manual_seed(dist.get_rank()) if "generator" in kinds else None

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.training:
            if "late" in self.kinds:
                if not hasattr(self, "table"):
                    self.register_buffer("table", torch.zeros(8))
                self.table = self.table * 0.5 + mean
            if "none first" in self.kinds:
                self.none = mean.clone() if self.none is None else self.none + mean
            if "bursting" in self.kinds:
                self.calls += 1
                if self.calls == 5:
                    self.register_buffer("burst", torch.zeros(1 << 18))
                if self.calls >= 5:
                    self.burst[:8] += mean
                    x = x + 0.01 * self.burst[:8]
            if "growing" in self.kinds:
                self.cache = torch.cat([self.cache, mean[None]])
            if "retyped" in self.kinds:
                self.typed = (self.typed.double() + mean) if self.typed.dtype == torch.float32 else self.typed + mean
            if "tied" in self.kinds:
                self.one += mean
            if "expanded" in self.kinds:
                self.wide = (self.wide[:1] + mean[:1]).expand(8)
            if "extra" in self.kinds:
                self.scale = {"amax": torch.maximum(self.scale["amax"], mean.max()), "count": self.scale["count"] + 1}
            if "attribute" in self.kinds:
                self.seen += float(mean.sum())
            if self.noise is not None:
                x = x + 0.01 * torch.rand(8, generator=self.noise)
        for name in ("table", "none", "typed", "one", "wide"):
            buffer = self._buffers.get(name)
            if buffer is not None:
                x = x + 0.01 * buffer.float()
        if "tied" in self.kinds:
            x = x + 0.01 * self.other
        if "growing" in self.kinds and len(self.cache):
            x = x + 0.01 * self.cache.mean(0)
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
    """With state that hangs on no parameter, as some optimizers count their steps."""

    def step(self, closure: Any = None) -> Any:
        self.state["global"] = {"steps": self.state.get("global", {}).get("steps", 0) + 1, "ema": torch.ones(3)}
        return super().step(closure)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "global": lambda p: GlobalSGD(p, lr=0.05, momentum=0.9),
    "zero": lambda p: phalanx.ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=0.01),
}


def strike_inside_update(job: Job, find_step: Callable[[], int]) -> None:
    """Adam asks for the step of each parameter before it updates it: at "inside" for the second."""
    get, seen = adam._get_value, [-1, 0]  # type: ignore[attr-defined]

    def get_and_strike(value: Any) -> Any:
        seen[:] = (seen[0], seen[1] + 1) if seen[0] == find_step() else (find_step(), 0)
        if seen[1] == 1:
            job.strike("inside", find_step())
        return get(value)

    adam._get_value = get_and_strike  # type: ignore[attr-defined]


def train_program(job: Job, program: Program) -> dict[str, Any]:
    """Train `program` on this rank, and return all that it holds."""
    does = program.does
    group.TRIAL_STEPS = step.TRIAL_STEPS = program.trial  # type: ignore[misc]
    with phalanx.init(timeout=60.0):
        torch.manual_seed(1)
        norm = [nn.BatchNorm1d(8)] if "norm" in program.layers else []
        model = nn.Sequential(
            nn.Linear(8, 8), *norm, Keeper(program.layers), nn.ReLU(), nn.Dropout(program.dropout), nn.Linear(8, 1)
        )
        spare = nn.Linear(8, 1)
        torch.manual_seed(100 + dist.get_rank())
        random.seed(dist.get_rank())
        if program.wrapper == "torch":
            ddp: nn.Module = nn.parallel.DistributedDataParallel(model)
        else:
            ddp = phalanx.DistributedDataParallel(
                model,
                check=False,
                broadcast_buffers=False,
                sync_batchnorm="auto" if "auto" in does else False,
            )
        if "hook" in does:
            ddp.register_comm_hook(None, fp16_compress_hook)  # type: ignore[operator]
        optimizer = OPTIMIZERS[program.optimizer](ddp.parameters())
        things: dict[str, Any] = {}
        scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        if "chained" in does:
            step_lr = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
            scheduler = torch.optim.lr_scheduler.ChainedScheduler([scheduler, step_lr])
        if "average" in does or "average of buffers" in does:
            things["average"] = AveragedModel(  # type: ignore[no-untyped-call]
                model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers="average of buffers" in does
            )
        if "metric" in does:
            things["metric"] = Metric()
        if "own value" in does:
            things["running"] = 0.0
        if "equal value" in does:
            things["count"], things["name"] = 0, "x"
        if "own list" in does:
            things["losses"] = []
        if "alias" in does:
            things["first"] = things["second"] = torch.zeros(3)
        if "scaler" in does:
            things["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        data = Numbers(job.samples)
        sampler = phalanx.DistributedSampler(data)
        loader: Any = DataLoader(data, batch_size=job.batch, sampler=sampler, num_workers=int("workers" in does))
        if "second" in does:
            judge = phalanx.DistributedDataParallel(nn.Linear(1, 1), check=False)
            things |= {"judge": judge, "second": torch.optim.Adam(judge.parameters(), lr=0.1)}
        state: Any = elastic.State(
            model=ddp, spare=spare, optimizer=optimizer, scheduler=scheduler, sampler=sampler, **things
        )
        model[0].register_forward_hook(lambda *_: job.strike("forward", state.step))
        model[-1].register_full_backward_hook(lambda *_: job.strike("backward", state.step))
        optimizer.register_step_pre_hook(lambda *_: job.strike("update", state.step))
        optimizer.register_step_post_hook(lambda *_: job.strike("updated", state.step))
        points.listen(lambda point: job.strike(point, state.step))
        strike_when_done(job, lambda: state.step)
        strike_inside_update(job, lambda: state.step)

        def update(loss: Tensor, *, is_last: bool) -> None:
            if "scaler" in does:
                state.scaler.scale(loss).backward()
            else:
                loss.backward()
            if not is_last:
                return
            if "scaler" in does:
                state.scaler.step(optimizer)
                state.scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()

        @elastic.run(state)
        def train(state: Any) -> None:
            for _ in state.epochs(program.epochs):
                for number, (ids, x, y) in enumerate(loader, start=1):
                    job.strike("batch", state.step)
                    job.wait(state.step)
                    is_last = "accumulate" not in does or number % 2 == 0
                    ddp.require_backward_grad_sync = is_last
                    out = ddp(x)
                    loss = (out.squeeze(1) - y).pow(2).mean()
                    update(loss, is_last=is_last)
                    if not is_last:
                        continue
                    if "second" in does:
                        state.judge(out.detach()).mean().backward()
                        state.second.step()
                        state.second.zero_grad()
                    if "late reduce" in does and state.step % 5 == 3:
                        job.strike("late", state.step)
                        dist.all_reduce(loss.detach().clone())
                    scheduler.step()
                    if "average" in things:
                        things["average"].update_parameters(model)
                    if "metric" in does:
                        things["metric"].add(loss)
                    if "own value" in does:
                        state.running = 0.9 * state.running + loss.item()
                    if "equal value" in does:
                        state.count, state.name = state.count + len(ids), state.name + "x"
                    if "own list" in does:
                        state.losses.append(ids.tolist())
                    if "alias" in does:
                        state.first += 1
                    if "late draw" in does or ("seldom draw" in does and state.step % 3 == 1):
                        random.random()
                        torch.rand(1)
                    if "new group" in does and state.step == 2 and len(optimizer.param_groups) == 1:
                        optimizer.add_param_group({"params": list(spare.parameters()), "lr": 0.5})
                    state.commit()
                if "validation" in does:
                    ddp.eval()
                    with torch.no_grad():
                        total = ddp(torch.ones(2, 8)).sum()
                    job.strike("validation", state.step)
                    dist.all_reduce(total)
                    ddp.train()

        train(state)
        return describe(state, model, optimizer, scheduler, things)


def describe(state: Any, model: nn.Module, optimizer: Any, scheduler: Any, things: dict[str, Any]) -> dict[str, Any]:
    """Everything that a rank holds."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    is_sharded = isinstance(optimizer, phalanx.ZeroRedundancyOptimizer)
    states = optimizer.shard_state_dict()["state"] if is_sharded else [optimizer.state.get(p, {}) for p in parameters]
    keeper = next(layer for layer in model if isinstance(layer, Keeper))
    return {
        "state_dict": {key: value for key, value in model.state_dict().items()},
        "buffers": dict(model.named_buffers(remove_duplicate=False)),
        "optimizer": [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            states,
            {key: value for key, value in optimizer.state.items() if isinstance(key, str)},
        ],
        "scheduler": {k: v for k, v in scheduler.state_dict().items() if k != "_get_lr_called_within_step"},
        "values": dict(state._values),
        "things": {name: one.state_dict() for name, one in things.items() if hasattr(one, "state_dict")},
        "averages": [dict(one.named_buffers()) for one in things.values() if isinstance(one, nn.Module)],
        "extra": keeper.scale,
        "attribute": keeper.seen,
        "generator": None if keeper.noise is None else keeper.noise.get_state(),
        "tied": "tied" not in keeper.kinds or keeper.one is keeper.other,
        "alias": "first" not in things or state.first is state.second,
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
