"""A training loop that saves, resumes, validates, logs and survives."""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from phalanx import elastic
from phalanx.checkpoint import CheckpointManager, RandomState
from phalanx.data import DistributedSampler
from phalanx.log import get_logger
from phalanx.report import begin as begin_report
from phalanx.report import recording
from phalanx.strategies import Strategy, get
from phalanx.strategies.precision import Precision
from phalanx.trainer.callbacks import Callback
from phalanx.trainer.metrics import Means, num_samples
from phalanx.trainer.progress_display import progress
from phalanx.trainer.scalars import Scalars

_logger = get_logger(__name__)
_DRY_STEPS = 2

Metric = Callable[[Any, Any], Tensor]


class Trainer:
    """Train `model` with `optimizer`; `fit` is the loop.

        trainer = phalanx.Trainer(model, optimizer, F.cross_entropy, strategy="mirrored", max_epochs=10,
                                  checkpoint="runs/a", save_every=1000, metrics={"accuracy": accuracy})
        trainer.fit(loader, val_loader)

    A batch is the model's arguments and then the target, or whatever the model's own `training_step(batch)` takes.
    Started as `python train.py`, the strategy may start the script again on several devices; under `phalanx run` the
    job goes on when ranks are lost (docs/elastic.md).

    Arguments:
        optimizer: a new one over the model's parameters, or a function that makes one of parameters.
        loss: of the model's result and the target: the mean over the samples. Without it `model.training_step(batch)`
            returns the loss, and `model.validation_step(batch)` a dict of metrics.
        strategy: one of `phalanx.strategies`, or its name.
        max_epochs, max_steps: where it ends, whichever comes first; steps are updates.
        scheduler: of the optimizer, or a function that makes one of it (where the strategy makes the optimizer anew).
        scheduler_interval: whether it steps with the epoch or with each update.
        accumulate: batches to an update; the gradient is that of all of them together.
        max_norm: clip the gradients to this 2-norm.
        precision: "32-true", "bf16-mixed" or "16-mixed".
        metrics: functions of the model's result and the target, for validation: one number for each sample of the
            batch, or its mean.
        checkpoint: the folder of `phalanx.CheckpointManager`. If there is one in it, `fit` goes on from there: the
            same bits as if it had never ended.
        save_every: updates between two checkpoints; default one at the end of each epoch.
        keep: how many checkpoints stay.
        callbacks: see `Callback`.
        report: a folder for the run's report, as `phalanx run --report` writes it (docs/report.md).
        log_dir: for TensorBoard: loss and rate of each `log_every`-th update, and what validation measures.
        seed: of Python's, NumPy's and torch's random numbers, another one on each replica. None leaves them.
        min_ranks: with fewer an elastic job waits.
        show_progress: one line for each epoch.
        dry_run: two batches of training and validation, and nothing is written: does it run at all?

    Raises:
        ValueError, TypeError: all that makes no sense, at once.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[Any], Optimizer],
        loss: Callable[[Any, Any], Tensor] | None = None,
        *,
        strategy: Strategy | str = "auto",
        max_epochs: int = 1,
        max_steps: int | None = None,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        accumulate: int = 1,
        max_norm: float | None = None,
        precision: Precision = "32-true",
        metrics: Mapping[str, Metric] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        save_every: int | None = None,
        keep: int | None = 3,
        callbacks: Sequence[Callback] = (),
        report: str | os.PathLike[str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        log_every: int = 10,
        seed: int | None = None,
        min_ranks: int = 1,
        show_progress: bool = True,
        dry_run: bool = False,
    ) -> None:
        numbers = {"max_epochs": max_epochs, "accumulate": accumulate, "log_every": log_every, "min_ranks": min_ranks}
        numbers |= {"max_steps": max_steps or 1, "save_every": save_every or 1}
        problems = [f"{name} must be 1 or more, got {n!r}" for name, n in numbers.items() if not _is_count(n)]
        if max_norm is not None and not max_norm > 0:
            problems.append(f"max_norm must be above zero, got {max_norm!r}")
        if scheduler_interval not in ("epoch", "step"):
            problems.append(f"scheduler_interval must be 'epoch' or 'step', got {scheduler_interval!r}")
        if save_every is not None and checkpoint is None:
            problems.append("save_every needs checkpoint, the folder to save in")
        if loss is None and not hasattr(model, "training_step"):
            problems.append(f"give a loss, or {type(model).__name__} a training_step(batch)")
        if loss is None and metrics:
            problems.append(
                "metrics need a loss function's outputs and targets; without one use validation_step(batch)"
            )
        if problems:
            raise ValueError("Trainer: " + "; ".join(problems))
        self.strategy = (
            get(strategy, **({"model": model} if strategy == "auto" else {})) if isinstance(strategy, str) else strategy
        )
        if seed is not None:
            _seed_all(seed + self.strategy.replica_id_in_sync_group)
        self._loss = loss
        self.model, self.optimizer = self.strategy.setup(
            model,
            optimizer,
            loss,
            loss_of=None if loss is not None else self._training_step,
            precision=precision,
        )
        self.scheduler = self._make_scheduler(scheduler)
        if isinstance(self.scheduler, ReduceLROnPlateau) and scheduler_interval == "step":
            raise ValueError("Trainer: ReduceLROnPlateau steps by what validation measures: scheduler_interval='epoch'")
        self._by_step = scheduler_interval == "step"
        self.max_epochs = 1 if dry_run else max_epochs
        self.max_steps = max_steps
        self._accumulate, self._max_norm = 1 if dry_run else accumulate, max_norm
        self._metrics = dict(metrics or {})
        self._save_every, self._log_every = save_every, log_every
        self._dry_run, self._show, self._min_ranks = dry_run, show_progress, min_ranks
        self.callbacks = list(callbacks)
        self.metrics: dict[str, float] = {}
        """What the latest validation measured."""
        self._manager: CheckpointManager | None = None
        if checkpoint is not None and not dry_run:
            self._manager = CheckpointManager(checkpoint, keep=keep, process_group=self.strategy.checkpoint_group)
        self._log_dir = None if dry_run else log_dir
        if report is not None and not dry_run:
            begin_report(report)
        if (recorder := recording.current()) is not None:
            world_size = dist.get_world_size() if dist.is_initialized() else 1
            recorder.sample_share = self.strategy.num_replicas_in_sync / world_size
        self._state: elastic.State | None = None

    # -- what callbacks read -------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Updates that are done."""
        return 0 if self._state is None else int(self._state.step)

    @property
    def epoch(self) -> int:
        """Epochs that are done."""
        return 0 if self._state is None else int(self._state.epoch)

    def stop(self, reason: str) -> None:
        """End the training after the epoch at hand (in `on_step_end`: after the step). Call it on every rank alike."""
        self._require_state().why_stopped = reason

    @property
    def why_stopped(self) -> str:
        """What `stop` was given; empty if nobody has called it."""
        return "" if self._state is None else str(self._state.why_stopped)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def fit(self, loader: DataLoader[Any], val_loader: DataLoader[Any] | None = None) -> None:
        """Train until `max_epochs` or `max_steps`, from the latest checkpoint on if there is one. Collective.

        Arguments:
            loader: its batch size is that of all replicas together: the strategy divides it. One that
                `strategy.loader` has made is taken as it is.
            val_loader: the same; each sample is counted once.

        Raises:
            ValueError, TypeError: a loader cannot be divided.
            CheckpointError: a checkpoint is damaged, does not fit, or cannot be written.
        """
        loader = self.strategy.distribute(loader)
        val_loader = None if val_loader is None else self.strategy.distribute(val_loader, padding=False)
        self._state = state = self._make_state(loader)
        self._restore(state)
        scalars = Scalars(self._log_dir, lambda: self.strategy.is_main)

        def fit_state(state: elastic.State) -> None:
            self._train(state, loader, val_loader, scalars)

        try:
            self._call("on_fit_begin")
            if self._is_elastic:
                elastic.run(state, min_ranks=self._min_ranks)(fit_state)(state)
            else:
                fit_state(state)
            if self._manager is not None:
                self._save(state)
                self._manager.wait()
            self._call("on_fit_end")
        except BaseException as error:
            self._call("on_error", error)
            raise
        finally:
            scalars.close()

    def _train(
        self, state: elastic.State, loader: DataLoader[Any], val_loader: DataLoader[Any] | None, scalars: Scalars
    ) -> None:
        self._return_callbacks(state)
        # Of who came later, and divided the batch by more replicas: all take what the first ones have.
        if loader.batch_sampler is not None:  # else its samples are batches
            loader.batch_sampler.batch_size = state.batch_size  # type: ignore[attr-defined]
        for epoch in state.epochs(self.max_epochs):
            if epoch and self._manager is not None and self._save_every is None:
                self._save(state)  # of the epoch before, which has been counted now
            if self._is_over:
                return
            self._call("on_epoch_begin")
            self.model.train()
            is_whole = self._train_epoch(state, loader, scalars, epoch)
            if val_loader is not None:
                self.metrics = self.validate(val_loader)
                scalars.add({f"val/{name}": value for name, value in self.metrics.items()}, self.step)
                self._call("on_validation_end", self.metrics)
            if not is_whole:
                return  # inside an epoch, where the next fit goes on
            if self.scheduler is not None and not self._by_step:
                self._step_scheduler()
            self._call("on_epoch_end")
            self._keep_callbacks(state)

    def _train_epoch(self, state: elastic.State, loader: DataLoader[Any], scalars: Scalars, epoch: int) -> bool:
        """Train on what is left of the epoch; whether to its end."""
        total, done = len(loader), 0
        if loader.generator is None:  # it would draw from the model's, once more where an epoch is taken up
            loader.generator = torch.Generator()
        loader.generator.manual_seed(hash((loader.sampler.seed, epoch)) & (2**63 - 1))  # type: ignore[attr-defined]
        shown: Any = loader
        if self._show:
            shown = progress(loader, desc=f"epoch {epoch + 1}/{self.max_epochs}", per_step=self._samples_shown(loader))
        for number, batch in enumerate(shown, start=1):
            group = (number - 1) // self._accumulate
            in_group = min(self._accumulate, total - group * self._accumulate)
            is_last = number == group * self._accumulate + in_group
            loss = self.strategy.compute_gradients(self._on_device(batch), share=1 / in_group, is_last=is_last)
            if not is_last:
                continue
            self.strategy.update(self._max_norm)
            if self.scheduler is not None and self._by_step:
                self.scheduler.step()
            self._keep_callbacks(state)
            state.commit()
            if self._show and done % self._log_every == 0:
                shown.update(loss=loss)
            self._after_step(state, loss, scalars)
            done += 1
            if self._is_over or (self._dry_run and done == _DRY_STEPS):
                return number == total
        return True

    def _after_step(self, state: elastic.State, loss: Tensor, scalars: Scalars) -> None:
        """Behind the commit: nothing of this is done again when a rank is lost."""
        if self.strategy.scaler is not None and (recorder := recording.current()) is not None:
            recorder.note_loss(recorder.read_loss(loss))  # the backward began from the scaled one
        if self._log_dir is not None and state.step % self._log_every == 0:
            mean = float(self.strategy.reduce("mean", loss))
            scalars.add({"train/loss": mean, "train/lr": self.optimizer.param_groups[0]["lr"]}, state.step)
        self._call("on_step_end", loss)
        if self._save_every is not None and state.step % self._save_every == 0:
            self._save(state)

    def validate(self, loader: DataLoader[Any]) -> dict[str, float]:
        """The loss and the metrics over all samples of all ranks, each counted once. Collective."""
        sampler = loader.sampler
        if isinstance(sampler, DistributedSampler) and self._is_elastic:  # of other ranks, if some were lost or came
            sampler.regroup(self.strategy.num_replicas_in_sync, self.strategy.replica_id_in_sync_group)
        loader = self.strategy.distribute(loader, padding=False)
        means = Means(self.strategy.device)
        names = ["loss", *self._metrics]
        was_training = self.model.training
        self.strategy.sync_buffers()
        self.model.eval()
        try:
            for batch, counts in self._validation_batches(loader):
                batch = self._on_device(batch)
                values = self._measure(batch)
                if values is not None and counts:
                    means.add(values, num_samples(batch))
        finally:
            self.model.train(was_training)
        group = self.strategy.training_group
        if self._loss is None:
            names = _agree_on_names(means.names, group)
        return means.compute(names, group)

    def _validation_batches(self, loader: DataLoader[Any]) -> Iterator[tuple[Any, bool]]:
        """The batches, and whether they count: where ranks must evaluate together, those with fewer repeat one."""
        mine = min(len(loader), _DRY_STEPS) if self._dry_run else len(loader)
        most = mine
        if self.strategy.evaluates_together and self.strategy.training_group is not None:
            agreed = torch.tensor(mine, device=self.strategy.device)
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.strategy.training_group)
            most = int(agreed)
        for batch in itertools.islice(loader, mine):
            yield batch, True
        for _ in range(most - mine):
            yield loader.collate_fn([loader.dataset[0]]), False

    def _measure(self, batch: Any) -> dict[str, Tensor] | None:
        """What a validation counts of a batch; None where another rank has the model's result."""
        if self._loss is None:
            step = getattr(self.strategy.bare_model, "validation_step", None)
            if step is None:
                raise ValueError(
                    f"Trainer.validate: without a loss function {type(self.strategy.bare_model).__name__} needs a "
                    "validation_step(batch), which returns a dict of metrics"
                )
            with torch.no_grad(), self.strategy.autocasting():
                return dict(step(batch))
        *inputs, target = batch
        result = self.strategy.evaluate(*inputs)
        if result is None:
            return None
        result = pytree.tree_map(_in_full_precision, result)
        with torch.no_grad():
            values = {"loss": self._loss(result, target)}
            return values | {name: metric(result, target) for name, metric in self._metrics.items()}

    # -- what goes into a checkpoint -----------------------------------------------------------------------------------

    def _make_state(self, loader: DataLoader[Any]) -> elastic.State:
        things = {**self.strategy.held(), "sampler": loader.sampler}
        if self.scheduler is not None:
            things["scheduler"] = self.scheduler
        things |= {"why_stopped": "", "saved_step": -1, "callbacks": None, "batch_size": loader.batch_size}
        return elastic.State(**things)

    def _stateful_callbacks(self) -> list[Any]:
        return [one for one in self.callbacks if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]

    def _keep_callbacks(self, state: elastic.State) -> None:
        """Before a commit: values of the state go back to the commit when a rank is lost; objects would not."""
        if stateful := self._stateful_callbacks():
            state.callbacks = [one.state_dict() for one in stateful]

    def _return_callbacks(self, state: elastic.State) -> None:
        if state.callbacks is not None:
            for callback, kept in zip(self._stateful_callbacks(), state.callbacks, strict=True):
                callback.load_state_dict(kept)

    def _parts(self, state: elastic.State) -> dict[str, Any]:
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler}
        return {
            **self.strategy.parts(),
            **scheduler,
            **{f"callback_{number}": one for number, one in enumerate(self._stateful_callbacks())},
            "position": _Position(state),
            "random": RandomState(self.strategy.checkpoint_group),
        }

    def _save(self, state: elastic.State) -> None:
        if self._manager is None or state.saved_step == state.step:
            return
        self._manager.async_save(state.step, self._parts(state))
        state.saved_step = state.step  # of the state: a rank that is new must not save alone what others have saved
        self._call("on_checkpoint")

    def _restore(self, state: elastic.State) -> None:
        if self._manager is None:
            return
        restored = self._manager.load(self._parts(state))
        if restored is not None and self.strategy.is_main:
            _logger.info("Trainer: goes on from %s, after step %d", restored.path, restored.step)

    # -- small things --------------------------------------------------------------------------------------------------

    @property
    def _is_elastic(self) -> bool:
        return self.strategy.is_elastic

    @property
    def _is_over(self) -> bool:
        return bool(self.why_stopped) or (self.max_steps is not None and self.step >= self.max_steps)

    def _require_state(self) -> elastic.State:
        if self._state is None:
            raise RuntimeError("Trainer: this is for callbacks, while fit runs")
        return self._state

    def _call(self, point: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, point)(self, *args)

    def _make_scheduler(self, scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None) -> LRScheduler | None:
        if scheduler is None:
            return None
        if not isinstance(scheduler, LRScheduler):
            return scheduler(self.optimizer)
        if scheduler.optimizer is not self.optimizer:
            raise ValueError(
                f"Trainer: the {type(scheduler).__name__} is of another optimizer than the one that trains, which "
                f"{type(self.strategy).__name__} has made: give a function, scheduler=lambda optimizer: "
                f"{type(scheduler).__name__}(optimizer, ...)"
            )
        return scheduler

    def _step_scheduler(self) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if "loss" not in self.metrics:
                raise ValueError("Trainer: ReduceLROnPlateau needs a validation with a metric 'loss'")
            self.scheduler.step(self.metrics["loss"])
        elif self.scheduler is not None:
            self.scheduler.step()

    def _samples_shown(self, loader: DataLoader[Any]) -> int:
        """For the progress line, which multiplies by the ranks of the job, some of which may share a batch."""
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        return (loader.batch_size or 1) * self.strategy.num_replicas_in_sync // world_size or 1

    def _on_device(self, batch: Any) -> Any:
        device = self.strategy.device
        if device.type == "cpu":
            return batch
        move = lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf  # noqa: E731
        return pytree.tree_map(move, batch)

    def _training_step(self, model: nn.Module, batch: Any) -> Tensor:
        """The model's own training_step, called through the strategy's wrapper, which must see a forward."""
        bare = self.strategy.bare_model
        forward, own = bare.forward, vars(bare).get("forward")

        def step(batch: Any) -> Tensor:
            bare.forward = forward
            return bare.training_step(batch)  # type: ignore[operator, no-any-return]

        bare.forward = step
        try:
            return model(batch)  # type: ignore[no-any-return]
        finally:
            vars(bare).pop("forward", None)
            if own is not None:  # the instance's, as of torch.compile
                bare.forward = own


class _Position:
    """How far training is: a part of a checkpoint."""

    def __init__(self, state: elastic.State) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        state = self._state
        return {"epoch": state.epoch, "step": state.step, "data": state.data_position()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._state.epoch, self._state.step = state_dict["epoch"], state_dict["step"]
        self._state.saved_step = state_dict["step"]
        self._state.load_data_position(state_dict["data"])


def _in_full_precision(leaf: Any) -> Any:
    """Metrics are not rounded to what autocast computes in."""
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in (torch.bfloat16, torch.float16) else leaf


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 1


def _agree_on_names(mine: Sequence[str], group: dist.ProcessGroup | None) -> list[str]:
    """The names of all ranks: one that had no batch has none. Collective."""
    if group is None:
        return list(mine)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, list(mine), group=group)
    return list(dict.fromkeys(name for names in everyone for name in names))


def _seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
