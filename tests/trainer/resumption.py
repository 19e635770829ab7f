"""Generated jobs of a Trainer, each trained undisturbed, and trained again with an end somewhere and a resumption."""

from __future__ import annotations

import os
import random
import resource
import signal
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import phalanx
from phalanx import strategies
from phalanx.errors import CheckpointError, PhalanxError
from phalanx.trainer import Callback, EarlyStopping

STRATEGIES = [  # the word, its options, on how many ranks
    ("single_device", {}, (1,)),
    ("mirrored", {}, (1, 2, 3)),
    ("multi_worker_mirrored", {}, (2,)),
    ("sharded", {}, (2, 3)),
    ("sharded", {"shard": "model"}, (2, 3)),
    ("pipeline", {"micro_batches": 3}, (2, 3)),
    ("local_sgd", {"sync_every": 3}, (2, 3)),
    ("diloco", {"sync_every": 3}, (2,)),
]
SCHEDULERS = {
    "none": None,
    "cosine by step": (lambda o: lr_scheduler.CosineAnnealingLR(o, 30), "step"),
    "one cycle": (lambda o: lr_scheduler.OneCycleLR(o, 2e-2, total_steps=100), "step"),
    "lambda": (lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step), "step"),
    "by epoch": (lambda o: lr_scheduler.StepLR(o, 1, 0.5), "epoch"),
    "plateau": (lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10), "epoch"),
    "warm restarts": (lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4), "step"),
}
DATA = ("table", "stream", "iterable", "function", "together")
ENDS = ("exception", "interrupt", "kill all", "kill one", "kill in a save", "disk full", "max_steps", "validation")


@dataclass(frozen=True)
class Case:
    """A job, and how it ends the first time: by `end` at update `at`."""

    strategy: str
    options: dict
    world_size: int
    epochs: int
    samples: int
    batch: int
    accumulate: int
    max_norm: float | None
    precision: str
    scheduler: str
    shuffle: bool
    workers: int
    dropout: float
    norm: bool
    optimizer: str
    average: bool
    patience: int | None
    validate: bool
    own_step: bool
    save_every: int | None
    end: str
    at: int
    by: int
    data: str = "table"

    @property
    def updates(self) -> int:
        """Of the whole job, unless it stops early."""
        batches = -(-self.samples // self.batch)
        return self.epochs * -(-batches // self.accumulate)


def draw_case(number: int, data: str = "table") -> Case:
    """The case of that number: always the same. `data`: what it is trained on, one of `DATA`."""
    draw = random.Random(number)
    strategy, options, world_sizes = draw.choice(STRATEGIES)
    world_size = draw.choice(world_sizes)
    replicas = 1 if strategy == "pipeline" else world_size
    pipeline, cut = strategy == "pipeline", options.get("shard") == "model"
    validate = draw.random() < 0.8
    batch = 6 if pipeline else draw.choice([4, 6, 8]) * replicas
    case = Case(
        strategy=strategy,
        options=options,
        world_size=world_size,
        epochs=draw.choice([1, 2, 3]),
        samples=batch * draw.choice([3, 4, 5, 6]) + (0 if pipeline else draw.choice([0, 0, 1, 5, 7])) * replicas,
        batch=batch,
        accumulate=1 if pipeline else draw.choice([1, 1, 2, 3]),
        max_norm=draw.choice([None, None, 0.5]),
        precision=draw.choice(["32-true", "32-true", "bf16-mixed"]),
        scheduler=draw.choice([name for name in SCHEDULERS if validate or name != "plateau"]),
        shuffle=draw.random() < 0.8,
        workers=draw.choice([0, 0, 0, 2]),
        dropout=draw.choice([0.0, 0.3]),
        norm=not (pipeline or cut) and draw.random() < 0.4,  # which refuses a batch of one sample
        optimizer=draw.choice(["adamw", "sgd", "adam"]),
        average=draw.random() < 0.4,
        patience=draw.choice([1, 2]) if validate and draw.random() < 0.3 else None,
        validate=validate,
        own_step=not pipeline and draw.random() < 0.25,
        save_every=draw.choice([None, 1, 2, 3]),
        end=draw.choice([end for end in ENDS if end != "validation" or validate]),
        at=0,
        by=draw.randrange(world_size),
    )
    norm = case.norm and (case.samples // replicas) % (batch // replicas) != 1 and data == "table"
    at = draw.randint(1, case.updates)
    changed = {} if data != "together" else {"own_step": True, "accumulate": 1}
    return Case(**{**vars(case), "norm": norm, "at": at, "data": data, **changed})


class Noisy(Dataset):
    """Samples to which a transform adds what it draws, of each of the generators."""

    def __init__(self, size: int, transforms: bool) -> None:
        self.inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(3))
        self.targets = self.inputs.square().sum(1, keepdim=True)
        self.transforms = transforms

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(6) * 0.1 + random.random() + np.random.rand() if self.transforms else 0
        return self.inputs[index] + noise, self.targets[index]


class Iterated(IterableDataset):
    """The same, one after another: those of one worker of a DataLoader, where there are several; `part` of all."""

    def __init__(self, size: int, transforms: bool, part: slice = slice(None)) -> None:
        self.samples, self.part, self.epoch = Noisy(size, transforms), part, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        order = random.Random(self.epoch).sample(range(len(self.samples)), len(self.samples))[self.part]
        return (self.samples[i] for i in order[number::count])


def make_loader(case: Case, size: int, batch: int, *, transforms: bool, shuffle: bool):
    """The data of a case, of `size` samples, in batches of all replicas."""
    table, workers = Noisy(size, transforms), case.workers
    if case.data == "stream":
        sizes = [size // 3, size // 2 - size // 3, size - size // 2]
        begins = [0, size // 3, size // 2]
        shards = phalanx.data.Stream(
            list(zip(begins, sizes, strict=True)),
            lambda shard: map(table.__getitem__, range(shard[0], sum(shard))),
            lengths=sizes,
            window=5,
        )
        return DataLoader(shards, batch, shuffle=shuffle, num_workers=workers)
    if case.data == "iterable":
        return DataLoader(Iterated(size, transforms), batch, num_workers=workers)
    if case.data == "function":

        def make_own(context):
            part = slice(context.input_pipeline_id, None, context.num_input_pipelines)
            own = context.get_per_replica_batch_size(batch)
            return DataLoader(Iterated(size, transforms, part), own, num_workers=workers)

        return make_own
    if case.data == "together" and transforms:
        other = DataLoader(Noisy(size // 2, transforms), batch // 2 * 2, shuffle=True)
        return {"first": DataLoader(table, batch, shuffle=shuffle, num_workers=workers), "second": other}
    return DataLoader(table, batch, shuffle=shuffle, num_workers=workers)


class Model(nn.Sequential):
    """With steps of its own, which are used where there is no loss function."""

    def training_step(self, batch):
        if isinstance(batch, dict):
            return F.mse_loss(self(batch["first"][0]), batch["first"][1]) + self(batch["second"][0]).square().mean()
        inputs, targets = batch
        return F.mse_loss(self(inputs), targets)

    def validation_step(self, batch):
        inputs, targets = batch
        return {"loss": (self(inputs) - targets).square(), "error": (self(inputs) - targets).abs()}


def make_model(case: Case) -> nn.Module:
    torch.manual_seed(1)
    norm = [nn.BatchNorm1d(12)] if case.norm else []
    drop = [nn.Dropout(case.dropout)] if case.dropout else []
    return Model(nn.Linear(6, 12), *norm, nn.ReLU(), *drop, nn.Linear(12, 12), nn.ReLU(), *drop, nn.Linear(12, 1))


def make_optimizer(case: Case):
    return {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    }[case.optimizer]


class History(Callback):
    """All that was seen at each point, as a part of checkpoints."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, trainer, loss):
        mean = float(trainer.strategy.reduce("mean", loss))
        self.seen.append((trainer.step, mean, float(trainer.optimizer.param_groups[0]["lr"]), dict(trainer.metrics)))

    def on_validation_end(self, trainer, metrics):
        self.seen.append(("validation", trainer.step, dict(metrics)))

    def on_epoch_end(self, trainer):
        self.seen.append(("epoch", trainer.epoch, trainer.step))

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state_dict):
        self.seen = list(state_dict["seen"])


class Average(Callback):
    """An exponential moving average of what this rank holds."""

    def __init__(self):
        self.kept = None

    def on_step_end(self, trainer, loss):
        now = [local(one) for one in trainer.model.parameters()]
        self.kept = now if self.kept is None else [old.lerp(new, 0.1) for old, new in zip(self.kept, now, strict=True)]

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state_dict):
        self.kept = state_dict["kept"]


class End(Callback):
    """Ends the job, in one of many ways."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank

    def _end(self) -> None:
        case = self.case
        if case.end in ("exception", "validation"):
            raise ZeroDivisionError
        if case.end == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if case.end == "kill all" or (case.end == "kill one" and self.rank == case.by):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, trainer, loss):
        if trainer.step == self.case.at and self.case.end != "validation":
            self._end()
        if self.case.end == "disk full" and trainer.step >= self.case.at:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))

    def on_validation_end(self, trainer, metrics):
        if self.case.end == "validation" and trainer.step >= self.case.at:
            self._end()

    def on_checkpoint(self, trainer):
        if self.case.end == "kill in a save" and trainer.step >= self.case.at:
            os.kill(os.getpid(), signal.SIGKILL)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of it."""
    tensor = tensor.detach()
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()


def fit(case: Case, folder, rank: int, *, ends: bool):
    """Train, from the latest checkpoint in `folder` on; what is left in the end, to the bit."""
    callbacks = [History()]
    callbacks += [Average()] if case.average else []
    callbacks += [EarlyStopping(patience=case.patience, min_delta=1.0)] if case.patience else []
    make, interval = SCHEDULERS[case.scheduler] or (None, "epoch")
    strategy = strategies.get(case.strategy, **case.options)
    trainer = phalanx.Trainer(
        make_model(case),
        make_optimizer(case),
        None if case.own_step else F.mse_loss,
        strategy=strategy,
        max_epochs=case.epochs,
        max_steps=case.at if ends and case.end == "max_steps" else None,
        scheduler=make,
        scheduler_interval=interval,
        accumulate=case.accumulate,
        max_norm=case.max_norm,
        precision=case.precision,
        metrics=None if case.own_step else {"error": lambda result, target: (result - target).abs()},
        checkpoint=folder / "checkpoints",
        save_every=case.save_every or ("epoch", ("epochs", 2))[case.samples % 2],
        keep_best=("loss", "min", 1) if case.validate and case.batch % 3 == 0 else None,
        callbacks=[*callbacks, *([End(case, rank)] if ends else [])],
        log_dir=folder / "log",
        log_every=2,
        seed=4,
        show_progress=False,
    )
    loader = make_loader(case, case.samples, case.batch, transforms=True, shuffle=case.shuffle)
    val_loader = make_loader(case, 13, 4 * case.world_size, transforms=False, shuffle=False)
    trainer.fit(loader, val_loader if case.validate else None)
    left = {
        "progress": (trainer.epoch, trainer.step, trainer.why_stopped),
        "metrics": dict(trainer.metrics),
        "best": trainer._state.best,
        "callbacks": [one.state_dict() for one in callbacks],
        "model": {name: local(one) for name, one in trainer.strategy.bare_model.state_dict().items()},
        "optimizer": [
            {name: local(one) if isinstance(one, torch.Tensor) else one for name, one in slots.items()}
            for slots in trainer.optimizer.state_dict()["state"].values()
        ]
        if not hasattr(trainer.optimizer, "kept_state")
        else [],
        "rates": [float(group["lr"]) for group in trainer.optimizer.param_groups],
        "scheduler": None if trainer.scheduler is None else trainer.scheduler.state_dict(),
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
    }
    strategy.close()
    return left


def end(case: Case, folder, rank: int) -> None:
    """Train until the case's end."""
    try:
        fit(case, folder, rank, ends=True)
    except (ZeroDivisionError, KeyboardInterrupt, CheckpointError, PhalanxError, OSError):
        pass
    finally:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def differing(left, right, path: str = "") -> list[str]:
    """Where two trees are not equal to the bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.shape == right.shape and left.dtype == right.dtype
        same = same and torch.equal(left.nan_to_num(123.0), right.nan_to_num(123.0))
        return [] if same else [path]
    if isinstance(left, dict) and isinstance(right, dict):
        found = [f"{path}.{key}" for key in left.keys() ^ right.keys()]
        return found + [
            one for key in left.keys() & right.keys() for one in differing(left[key], right[key], f"{path}.{key}")
        ]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return [f"{path}: {len(left)} and {len(right)} of them"]
        return [one for n, pair in enumerate(zip(left, right, strict=True)) for one in differing(*pair, f"{path}[{n}]")]
    same = left == right or (left != left and right != right) or (callable(left) and callable(right))
    return [] if same else [f"{path}: {left!r} and {right!r}"]


def scalars(folder):
    """What TensorBoard shows: (step, value) of each curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "log")).Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
