"""A training job that is disturbed at chosen places, and what it leaves: weights, and which samples each step used."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from tests.small_models import mlp
from tests.training import copy_state
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import phalanx
from phalanx import elastic
from phalanx._comm.diagnostics.progress_page import open_page, parse_page
from phalanx.elastic import points
from phalanx.optim import undo


class Numbers(Dataset[Any]):
    """Sample i says that it is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[int, Tensor, Tensor]:
        return i, torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.tensor(float(i % 3))


def lose_own_host() -> NoReturn:
    """Kill every process of the host that this one is on, this one last.

    All are stopped before the first one is killed: otherwise one that still runs tells the first host of its loss.
    """
    here = os.readlink("/proc/self/ns/net")
    for sent in (signal.SIGSTOP, signal.SIGKILL):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdecimal() and int(name) != os.getpid() and os.readlink(f"/proc/{name}/ns/net") == here:
                    os.kill(int(name), sent)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process was killed")


@dataclass(frozen=True)
class Strike:
    """Rank `rank` is killed the first time it gets to `place` at step `step`, or at any step (-1).

    With `host` all processes of its host are.
    """

    rank: int
    place: str
    step: int
    signal: signal.Signals = signal.SIGKILL
    host: bool = False


@dataclass(frozen=True)
class Job:
    """What is trained, and what befalls it."""

    folder: str
    strikes: tuple[Strike, ...] = ()
    epochs: int = 2
    samples: int = 64
    batch: int = 4
    workers: int = 0
    persistent: bool = False
    starts_workers: str = "fork"
    wrapper: str = "phalanx"
    optimizer: str = "adam"
    accumulate: int = 1
    amp: bool = False
    scheduler: bool = False
    padding: bool = True
    draws: bool = True
    checkpoint: str = ""
    resume: str = ""
    batch_of: str | None = None

    # -- faults --------------------------------------------------------------------------------------------------

    def strike(self, place: str, step: int) -> None:
        """Die, if it is this rank's turn; each strike happens once in a job."""
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
        for number, one in enumerate(self.strikes):
            if (one.rank, one.place) == (rank, place) and one.step in (-1, step):
                try:
                    os.close(os.open(f"{self.folder}/struck-{number}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                if one.host:
                    lose_own_host()
                os.kill(os.getpid(), one.signal)

    # -- what it leaves ------------------------------------------------------------------------------------------

    def log(self, step: int, epoch: int, samples: list[int]) -> None:
        generation = int(os.environ.get("PHALANX_GENERATION", "0")) + (1000 if self.resume else 0)
        line = f"{generation} {step} {epoch} {dist.get_rank()} {','.join(map(str, samples))}\n"
        with open(f"{self.folder}/samples-{os.getpid()}", "a") as file:
            file.write(line)

    def samples_of_epochs(self) -> list[list[int]]:
        """What was used in each epoch by the steps that counted: a step that was done again counts as the last time."""
        latest: dict[int, int] = {}
        lines = [
            (int(g), int(step), int(epoch), rank, [int(i) for i in samples.split(",")])
            for path in Path(self.folder).glob("samples-*")
            for g, step, epoch, rank, samples in (line.split() for line in path.read_text().splitlines())
        ]
        for generation, step, *_ in lines:
            latest[step] = max(latest.get(step, 0), generation)
        used: list[list[int]] = [[] for _ in range(self.epochs)]
        for generation, step, epoch, _, samples in lines:
            if generation == latest[step]:
                used[epoch] += samples
        return used


def build(job: Job) -> tuple[nn.Module, Any, Any]:
    """The same on every rank, but for what is drawn in training."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3 if job.draws else 0.0), nn.Linear(16, 1)
    )
    if job.optimizer == "offload":  # in half precision: what is lost with a master's last bits shows in later steps
        model.bfloat16().register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())
    kinds: dict[str, Callable[..., Any]] = {
        "adam": torch.optim.Adam,
        "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    }
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    random.seed(200 + rank)
    if job.wrapper == "torch":
        ddp: nn.Module = nn.parallel.DistributedDataParallel(model)
    else:
        ddp = phalanx.DistributedDataParallel(model, check=False)
    if job.optimizer in ("zero", "offload"):
        optimizer: Any = phalanx.ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.Adam, lr=0.01, offload=job.optimizer == "offload"
        )
    else:
        optimizer = kinds[job.optimizer](ddp.parameters(), lr=0.01)
    return ddp, optimizer, model


def train_job(job: Job) -> dict[str, Any]:
    """Train as one rank of the job; every rank runs this."""
    with phalanx.init(timeout=60.0):
        ddp, optimizer, model = build(job)
        data = Numbers(job.samples)
        sampler = phalanx.DistributedSampler(data, padding=job.padding)
        loader: Any = DataLoader(
            data,
            batch_size=job.batch,
            sampler=sampler,
            num_workers=job.workers,
            persistent_workers=job.persistent and job.workers > 0,
        )
        things: dict[str, Any] = {"model": ddp, "optimizer": optimizer, "sampler": sampler, "history": []}
        if job.scheduler:
            things["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        if job.amp:
            things["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        state = elastic.State(batch=job.batch_of, **things)
        objects = [id(thing) for thing in things.values() if not isinstance(thing, list)]
        model[0].register_forward_hook(lambda *_: job.strike("forward", state.step))
        model[4].register_full_backward_hook(lambda *_: job.strike("backward", state.step))
        inner = getattr(optimizer, "optim", optimizer)
        inner.register_step_pre_hook(lambda *_: job.strike("update", state.step))
        inner.register_step_post_hook(lambda *_: job.strike("updated", state.step))
        points.listen(lambda point: job.strike(point, state.step))
        strike_when_done(job, lambda: state.step)

        if job.resume:
            state.load_state_dict(phalanx.load_checkpoint(job.resume))

        @elastic.run(state, checkpoint=job.checkpoint or None)
        def train(state: Any) -> None:
            for epoch in state.epochs(job.epochs):
                for number, (ids, x, y) in enumerate(loader, start=1):
                    job.strike("batch", state.step)
                    job.log(state.step, epoch, ids.tolist())
                    is_last = number % job.accumulate == 0 or number == len(loader)
                    ddp.require_backward_grad_sync = is_last
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=job.amp):
                        loss = (ddp(x).squeeze(1) - y).float().pow(2).mean() / job.accumulate
                    if job.draws:
                        loss = loss * (1.0 + 0.01 * random.Random(random.getrandbits(32)).random())
                    if job.amp:
                        state.scaler.scale(loss).backward()
                    else:
                        loss.backward()
                    if not is_last:
                        continue
                    if job.amp:
                        state.scaler.step(optimizer)
                        state.scaler.update()
                    else:
                        optimizer.step()
                    optimizer.zero_grad()
                    if job.scheduler:
                        state.scheduler.step()
                    if job.batch_of is None or state.step not in state.history:
                        state.history.append(state.step)
                    state.commit()

        train(state)
        assert objects == [id(thing) for thing in things.values() if not isinstance(thing, list)]
        assert state.history == list(range(state.step))
        return {
            "weights": copy_state(ddp),
            "step": state.step,
            "random": torch.get_rng_state(),
            "rate": optimizer.param_groups[0]["lr"],
            "scale": state.scaler.get_scale() if job.amp else 1.0,
            "fds": len(os.listdir("/proc/self/fd")),
            "samples_on_page": samples_on_page(),
        }


def samples_on_page() -> int:
    """Return how many samples `phalanx top` sees of this rank; 0 if it has committed no step."""
    said = parse_page(bytes(open_page("")._memory))
    assert said is not None
    return 0 if said.state is None else said.state.samples


def strike_when_done(job: Job, find_step: Callable[[], int]) -> None:
    """At "done" this rank has said that its part of a sharded update is made, and is about to wait for the others."""
    publish = undo.Undo._publish

    def publish_and_strike(self: undo.Undo, phase: int) -> None:
        publish(self, phase)
        if phase == undo._DONE:
            job.strike("done", find_step())

    undo.Undo._publish = publish_and_strike  # type: ignore[method-assign]


@contextlib.contextmanager
def strikes_at_exchanges(job: Job, find_step: Callable[[], int]) -> Iterator[None]:
    """At "1 called" this rank is about to take part in the first exchange since its latest step, at "1 left" it has."""
    names = "all_reduce", "batch_isend_irecv"
    own = {name: getattr(dist, name) for name in names}
    seen = [-1, 0]

    def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if seen[0] != find_step():
            seen[:] = find_step(), 0
        seen[1] += 1
        number = seen[1]
        job.strike(f"{number} called", seen[0])
        result = function(*args, **options)
        job.strike(f"{number} left", seen[0])
        return result

    try:
        for name in names:
            setattr(dist, name, functools.partial(call, own[name]))
        yield
    finally:
        for name in names:
            setattr(dist, name, own[name])


def train_apart(job: Job, kind: str) -> dict[str, Any]:
    """Replicas that train by themselves, and meet every four steps."""
    with phalanx.init(timeout=60.0):
        model = mlp((8, 16, 1), activation=nn.ReLU, seed=1)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        given: list[Tensor] = []
        inner.register_step_post_hook(lambda *_: given.__setitem__(slice(None), map(torch.clone, model.parameters())))
        if kind == "LocalSGD":
            rounds: Any = phalanx.LocalSGD(model, inner, sync_every=4)
        else:
            outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            rounds = phalanx.DiLoCo(model, inner, outer, sync_every=4)
        data = Numbers(job.samples)
        sampler = phalanx.DistributedSampler(data)
        loader: Any = DataLoader(data, batch_size=job.batch, sampler=sampler)
        state = elastic.State(model=model, optimizer=inner, sampler=sampler, rounds=rounds)
        points.listen(lambda point: job.strike(point, state.step))

        @elastic.run(state)
        def train(state: Any) -> None:
            for epoch in state.epochs(job.epochs):
                for ids, x, y in loader:
                    job.log(state.step, epoch, ids.tolist())
                    job.strike("batch", state.step)
                    inner.zero_grad()
                    (model(x).squeeze(1) - y).pow(2).mean().backward()
                    try:
                        inner.step()
                    except phalanx.PhalanxError:  # a round that a loss has ended has changed no parameter
                        Path(f"{job.folder}/torn-{os.getpid()}-{state.step}").touch()
                        assert all(map(torch.equal, given, model.parameters()))
                        raise
                    state.commit()
            rounds.finish()

        with strikes_at_exchanges(job, lambda: state.step):
            train(state)
        return {"weights": copy_state(model), "step": state.step}
