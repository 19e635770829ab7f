"""`Trainer` is a training loop that saves, resumes, validates, logs and survives failures."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from phalanx import elastic
from phalanx._base.log import get_logger
from phalanx._comm.backend import rendezvous
from phalanx._comm.backend.shared import is_joining
from phalanx._job.report import recording
from phalanx.checkpoint import CheckpointManager, RandomState
from phalanx.checkpoint.best import KeepBest
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.random_state import seed_all
from phalanx.checkpoint.write_problems import make_folders
from phalanx.errors import CheckpointError
from phalanx.loggers.guarded import GuardedLoggers
from phalanx.loggers.resolve import resolve
from phalanx.loggers.tensorboard_logger import TensorBoardLogger
from phalanx.report import begin as begin_report
from phalanx.strategies import Strategy, get
from phalanx.strategies.loss import loss_of_training_step
from phalanx.strategies.per_rank_state import PerRankState
from phalanx.strategies.strategy import Precision
from phalanx.trainer.arguments import Resume, SaveEvery, Saves, find_problems, is_count
from phalanx.trainer.callbacks import Callback, CallbackCalls, CallbackRecovery, CallbackStates, EarlyStopping
from phalanx.trainer.data_seeds import agree_on_seeds
from phalanx.trainer.fit_display import FitDisplay
from phalanx.trainer.loaders import FitLoader, Loaders, divide
from phalanx.trainer.stop_vote import StopVote
from phalanx.trainer.validation import Metric, Validation, on_device

_DRY_STEPS = 2
_KEEP = 3


class Trainer:
    """Train `model` with `optimizer`; `fit` is the loop.

        trainer = phalanx.Trainer(model, optimizer, F.cross_entropy, strategy="mirrored", max_epochs=10,
                                  checkpoint="runs/a", save_every=1000, metrics={"accuracy": accuracy})
        trainer.fit(loader, val_loader)

    A batch is the model's arguments followed by the target, or the argument of the model's own `training_step(batch)`.
    If the script is started as `python train.py`, the strategy may restart it with a process for each device; under
    `phalanx run`, the job continues when ranks are lost (`phalanx docs elastic`).

    Arguments:
        model: the plain model on any device; the strategy wraps and moves it.
        optimizer: a new optimizer over the model's parameters, or a function that makes one from parameters.
        loss: a function of the model's result and the target, which returns the mean over the samples. Without it,
            `model.training_step(batch)` returns the loss, and `model.validation_step(batch)` a dict of metrics.
        strategy: one of `phalanx.strategies`, or its name.
        max_epochs: the number of passes over the data.
        max_steps: the number of updates after which training ends, unless `max_epochs` ends it earlier.
        scheduler: the optimizer's scheduler, or a function that makes one (needed if the strategy recreates the
            optimizer).
        scheduler_interval: whether the scheduler steps after each epoch or after each update.
        accumulate: the number of batches per update. The gradient is the mean over all their samples.
        max_norm: clip the gradients to this 2-norm.
        precision: "32-true", "bf16-mixed" or "16-mixed".
        metrics: functions of the model's result and the target, by name, for validation. Each returns one number per
            sample, or the mean of the batch.
        checkpoint: the folder of `phalanx.CheckpointManager`, its address (`s3://bucket/runs/a`), or the manager, with
            `keep`, `keep_best` and its other options. If there is a checkpoint, `fit` continues from it, bitwise as if
            the run had never been interrupted. A save that fails logs a warning, and training continues.
        save_every: the number of updates between two checkpoints, "epoch" (the default), or ("epochs", 5) for every
            fifth epoch.
        keep: how many checkpoints to keep.
        keep_best: ("accuracy", "max", 3) also keeps the 3 checkpoints with the best validations; each epoch whose
            validation is among the best is saved.
        callbacks: see `Callback`.
        report: a folder for the run's report, as `phalanx run --report` writes it (`phalanx docs report`).
        log_dir: a folder for TensorBoard: loss and learning rate of each `log_every`-th update, and validation metrics.
        logger: "wandb", "mlflow", "tensorboard", "csv", one of `phalanx.loggers`, a wandb run, an object with
            Lightning's `log_metrics`, or a list of these. Loggers receive the same values as `log_dir`, and the run's
            report.
        hyperparameters: settings for the loggers, in addition to those of the Trainer itself.
        seed: seeds Python, NumPy and torch with this number plus the replica's index. None sets no seed.
        min_ranks: the number of ranks below which an elastic job pauses.
        show_progress: print one line for each epoch and validation, and lines on where `fit` resumes and why it ends.
        dry_run: run two batches of training and validation, with an update for each (`accumulate` is 1), and write
            nothing: a quick check that the script runs.

    Raises:
        ValueError, TypeError: arguments are invalid; one message lists all problems.
        ModuleNotFoundError: the package of a logger is not installed.
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
        checkpoint: str | os.PathLike[str] | CheckpointManager | None = None,
        save_every: SaveEvery | None = None,
        keep: int | None = _KEEP,
        keep_best: KeepBest | None = None,
        callbacks: Sequence[Callback] | Callback = (),
        report: str | os.PathLike[str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        log_every: int = 10,
        logger: Any = None,
        hyperparameters: Mapping[str, Any] | None = None,
        seed: int | None = None,
        min_ranks: int = 1,
        show_progress: bool = True,
        dry_run: bool = False,
    ) -> None:
        counts = {"max_epochs": max_epochs, "accumulate": accumulate, "log_every": log_every, "min_ranks": min_ranks}
        counts["max_steps"] = 1 if max_steps is None else max_steps
        problems = [f"{name} must be 1 or more, got {n!r}" for name, n in counts.items() if not is_count(n)]
        problems += find_problems(model, optimizer, strategy, loss, metrics, callbacks, seed, scheduler)
        if max_norm is not None and not max_norm > 0:
            problems.append(f"max_norm must be above zero, got {max_norm!r}")
        if scheduler_interval not in ("epoch", "step"):
            problems.append(f"scheduler_interval must be 'epoch' or 'step', got {scheduler_interval!r}")
        if save_every is not None and checkpoint is None:
            problems.append("save_every needs checkpoint, the folder to save in")
        if keep_best is not None and checkpoint is None:
            problems.append("keep_best needs checkpoint, the folder to save in")
        if isinstance(checkpoint, CheckpointManager):
            if keep_best is not None or keep != _KEEP:
                problems.append("pass keep and keep_best to the CheckpointManager")
            keep_best = checkpoint.keep_best
        self._saves = Saves()
        try:
            self._saves = Saves.of(save_every, keep_best)
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError("Trainer: " + "; ".join(problems))
        loggers = resolve(None if dry_run else logger, "Trainer: logger")
        if log_dir is not None and not dry_run:
            loggers = [*loggers, TensorBoardLogger(log_dir)]
        self.strategy = (
            get(strategy, **({"model": model} if strategy == "auto" else {})) if isinstance(strategy, str) else strategy
        )
        if seed is not None:
            seed_all(seed + self.strategy.replica_id_in_sync_group)
        self.model, self.optimizer = self.strategy.setup(
            model,
            optimizer,
            loss,
            loss_of=None
            if loss is not None
            else lambda model, batch: loss_of_training_step(model, self.strategy.bare_model, batch),
            precision=precision,
        )
        self.scheduler = make_scheduler(scheduler, self.optimizer, self.strategy, scheduler_interval)
        self._by_step = scheduler_interval == "step"
        self.max_epochs = 1 if dry_run else max_epochs
        self.max_steps = max_steps
        self._accumulate, self._max_norm = 1 if dry_run else accumulate, max_norm
        most_batches = _DRY_STEPS if dry_run else None
        self._validation = Validation(
            self.strategy, self.model, loss, dict(metrics or {}), most_batches, lambda: self._stops.has_sigterm
        )
        self._log_every = log_every
        self._dry_run, self._min_ranks = dry_run, min_ranks
        self._display = FitDisplay(show=show_progress)
        self.callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        for callback in self.callbacks:
            if isinstance(callback, EarlyStopping):
                callback.follow(self._saves.best)
        self._manager: CheckpointManager | None = None
        if isinstance(checkpoint, CheckpointManager):
            self._manager = checkpoint
        elif checkpoint is not None:
            self._manager = CheckpointManager(checkpoint, keep=keep, keep_best=keep_best)
        self._folder = None if self._manager is None else self._manager.folder
        if dry_run:
            self._manager = None
        if self._manager is not None:
            self._manager.process_group = self.strategy.checkpoint_group
        self._log_dir = None if dry_run else log_dir
        self._scalars = Scalars(GuardedLoggers(loggers, self._writes))
        self._settings = {"accumulate": accumulate, "max_norm": max_norm, "precision": precision, "seed": seed}
        self._hyperparameters = dict(hyperparameters or {})
        if report is not None and not dry_run:
            begin_report(report)
        if (recorder := recording.current()) is not None:
            world_size = dist.get_world_size() if dist.is_initialized() else 1
            recorder.sample_share = self.strategy.num_replicas_in_sync / world_size
        self._state: elastic.State | None = None
        self._stops = StopVote(self.strategy)
        self._has_validation = False
        self._calls = CallbackCalls()
        self._recovery = CallbackRecovery(self.strategy)

    # -- for callbacks -------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Return the number of completed updates."""
        return 0 if self._state is None else int(self._state.step)

    @property
    def epoch(self) -> int:
        """Return the number of completed epochs."""
        return 0 if self._state is None else int(self._state.epoch)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of the latest validation."""
        return {} if self._state is None else self._state.metrics

    @property
    def best_checkpoint(self) -> Path | str | None:
        """Return the path of the best checkpoint of `keep_best`, as this rank sees it; None if there is none yet."""
        return None if self._manager is None else self._manager.best()

    def stop(self, reason: str) -> None:
        """Stop all ranks after the same step, and save.

        Any rank may call it, at any time while `fit` runs: in a callback, in a signal handler, in another thread.

        The ranks agree within about 0.1 s, or at the end of a longer step; after a call in `on_step_end`, at once. A
        call during a validation ends the training after that epoch. Under strategies whose ranks train apart
        (`local_sgd` and the like), they agree at the next checkpoint or validation; without either, only this rank
        stops.

        Raises:
            RuntimeError: `fit` has not begun.
        """
        if self._state is None:
            raise RuntimeError("Trainer.stop: only callbacks may call this, while fit runs")
        self._stops.request(reason)
        if not self.strategy.is_in_step and self._manager is None and not self._has_validation:
            self._state.why_stopped = reason

    @property
    def why_stopped(self) -> str:
        """Return the reason passed to `stop`, or "SIGTERM"; "" if the training has not been stopped early."""
        return "" if self._state is None else str(self._state.why_stopped or self._stops.reason)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def fit(self, loader: Loaders, val_loader: Loaders | None = None, *, resume: Resume = "latest") -> None:
        """Train until `max_epochs` or `max_steps`, from the latest checkpoint if there is one. All ranks call it.

        Arguments:
            loader: a DataLoader whose batch size is that of all replicas together: the strategy divides it, also over
                an IterableDataset. A loader made by `strategy.loader` is used as it is. A dict of loaders yields a dict
                of batches, and a function of `phalanx.strategies.InputContext` returns each replica's own iterable
                (see `phalanx docs trainer`).
            val_loader: takes the same forms; each sample is counted once. With a dict of loaders, metrics are named
                "name/metric".
            resume: "best" resumes from the best checkpoint of `keep_best`. When the launcher restarts the script after
                a failure, `fit` resumes from the latest checkpoint anyway.

        Another call continues where the last one ended, for example after `trainer.max_epochs = 20`.

        Raises:
            ValueError, TypeError: a loader cannot be divided, or has no batch; an output folder can't be created.
            CheckpointError: a checkpoint is damaged, does not fit, or cannot be written.
        """
        batches = divide(self.strategy, "loader", loader)
        val_loader = None if val_loader is None else self._validation.divide(val_loader)
        if isinstance(self.scheduler, ReduceLROnPlateau) and val_loader is None:
            raise ValueError("Trainer.fit: ReduceLROnPlateau steps by the validation's loss: pass a val_loader")
        if resume not in ("latest", "best"):
            raise ValueError(f"Trainer.fit: resume must be 'latest' or 'best', got {resume!r}")
        if self._saves.best is not None and val_loader is None:
            raise ValueError(
                f"Trainer.fit: keep_best uses {self._saves.best.metric!r} of the validation: give a val_loader"
            )
        self._validation.check_metrics(val_loader, [self._saves.best, *self.callbacks])
        group = self.strategy.training_group
        if group is None or not is_joining(group):  # a rank that joins a running job finds them created
            folders = {"checkpoint": self._folder, "log_dir": self._log_dir}
            peers = Peers(self.strategy.checkpoint_group, what="Trainer.fit")
            make_folders(peers, folders, only_try=self._dry_run)
        before, self._state = self._state, self._make_state(batches)
        self._stops = StopVote(self.strategy)
        state = self._state
        if before is not None:
            TrainingPosition(state, self._scalars).resume_from(before)
        self._restore(state, from_best=resume == "best" and rendezvous.attempt() == "0")

        with self._stops.handling_sigterm():
            self._fit(state, batches, val_loader)

    def _fit(self, state: elastic.State, batches: FitLoader, val_loader: Loaders | None) -> None:
        def fit_state(state: elastic.State) -> None:
            self._train(state, batches, val_loader)

        group = self.strategy.training_group
        self._has_validation = val_loader is not None
        try:
            self._call("on_fit_begin")
            if group is None or not is_joining(group):
                self._stops.vote(state)
            if (self._is_over or state.epoch >= self.max_epochs) and state.step:
                self._display.show_finished(self, self._manager.folder if self._manager else "")
            first_step = state.step
            if self.strategy.is_elastic:
                elastic.run(state, min_ranks=self._min_ranks)(fit_state)(state)
            else:
                fit_state(state)
            if self._manager is not None:
                self._save(state)
                self._manager.wait()
            if state.step > first_step and not self._dry_run:
                self._display.show_end(self)
            if self._stops.is_preempted:
                self._display.show_preempted(self._manager.folder if self._manager else "")
                raise SystemExit(os.EX_TEMPFAIL)
            self._call("on_fit_end")
            end_loggers(self._scalars.loggers, None, writes=self.strategy.is_main)
        except BaseException as error:
            end_loggers(self._scalars.loggers, error, writes=self.strategy.is_main)
            if isinstance(error, KeyboardInterrupt):
                self._display.show_interrupted(self, None if self._manager is None else self._manager.saved_step)
            self._call("on_error", error)
            raise

    def _train(self, state: elastic.State, loader: FitLoader, val_loader: Loaders | None) -> None:
        self._recovery.agree(CallbackStates(self.callbacks), state)
        if self._scalars.loggers and self.strategy.training_group is not None:
            agree_on_runs(self._scalars.loggers, Peers(self.strategy.training_group))
        if loader.is_own:
            agree_on_seeds(state, self.strategy)
        for epoch in state.epochs(self.max_epochs):
            if self.strategy.is_in_step or self._has_validation:  # a validation brings ranks together that train apart
                self._stops.vote(state)
            is_due = self._saves.is_due_at_epoch(epoch) or state.measured == (state.step, True)
            if epoch and (is_due or (loader.sampler is not None and self._saves.is_due_at_step(state.step))):
                self._save(state)  # it belongs to the previous epoch, which is counted now
            is_inside = bool((state.data_position() or {"consumed": 0})["consumed"] or state.batches)
            if self._is_over and not is_inside:
                return
            self.model.train()
            self._call("on_epoch_begin")  # it may put layers into eval mode again, to freeze them
            is_whole = self._train_epoch(state, loader, epoch)
            if not is_whole or self._stops.is_preempted:  # before the validation, which a resumed run does not repeat
                self._save(state)
            if self._stops.is_preempted:
                return
            self._recovery.save(CallbackStates(self.callbacks), state)
            if val_loader is not None:
                metrics = self.validate(val_loader)
                if self._vote(state):  # some rank has skipped a part of the validation
                    return
                state.metrics = metrics
                if is_whole:
                    state.best, is_best = self._saves.judge(state.best, state.metrics)
                    state.measured = state.step, is_best
                self._display.show_metrics(self.metrics)
                self._scalars.add({f"val/{name}": value for name, value in self.metrics.items()}, self.step)
                self._call("on_validation_end", self.metrics)
            if not is_whole:
                return  # inside an epoch, where the next fit continues
            if self.scheduler is not None and not self._by_step:
                step_scheduler(self.scheduler, self.metrics)
            self._call("on_epoch_end")
            state.batches = 0

    def _train_epoch(self, state: elastic.State, loader: FitLoader, epoch: int) -> bool:
        """Train on the rest of the epoch; return whether its end was reached."""
        loader.begin_epoch(epoch, state.batch_size, state.data_seeds)
        total, first_step = loader.total, self.step
        if self._is_over:  # a run that ended inside the epoch, and is restarted
            return total == 0
        name = f"epoch {epoch + 1}/{self.max_epochs}"
        shown = self._display.batches(loader.loader, name, loader.samples_shown)
        number, update_loss = 0, UpdateLoss()
        for batch, share, is_last, number in loader.batches(shown, self._accumulate, state.batches):
            loss = self.strategy.compute_gradients(
                on_device(batch, self.strategy.device), share=share, weight=1.0, is_last=is_last
            )
            self._display.add_loss(loss, self.step + 1)
            update_loss.add(loss, share)
            if not is_last:
                continue
            self.strategy.update(self._max_norm)
            if self.scheduler is not None and self._by_step:
                self.scheduler.step()
            if total is None:
                state.batches = number
            state.commit()
            self._after_step(state, loss, update_loss.pop(), ends_epoch=number == total)
            if self._is_over or (self._dry_run and self.step == first_step + _DRY_STEPS):
                self._display.end_epoch()
                return number == total
        self._display.end_epoch()
        if total is None and not number and not state.batches:
            raise ValueError(f"Trainer: loader has no batch, in epoch {epoch + 1}")
        return True

    def _after_step(self, state: elastic.State, loss: Tensor, update_loss: Tensor, *, ends_epoch: bool) -> None:
        """Do the work after the commit of a step. It is not repeated after the loss of a rank."""
        if self.strategy.scaler is not None and (recorder := recording.current()) is not None:
            recorder.note_loss(recorder.read_loss(update_loss))  # the backward began from the scaled loss
        if self._scalars.loggers and state.step % self._log_every == 0:
            mean = float(self.strategy.reduce("mean", update_loss))
            self._scalars.add({"train/loss": mean, "train/lr": float(self.optimizer.param_groups[0]["lr"])}, state.step)
        self._call("on_step_end", loss)
        self._recovery.called_step = state.step
        if self._saves.is_due_at_step(state.step) and not ends_epoch:  # that save follows the validation
            self._save(state)
        if self._stops.is_due(state) or self._calls.has_any(self.callbacks, "on_step_end"):
            self._vote(state)

    def _vote(self, state: elastic.State) -> bool:
        """Vote on whether to stop, unless ranks train apart; return whether all stop because of a SIGTERM."""
        if self.strategy.is_in_step:
            self._stops.vote(state)
        return self._stops.is_preempted

    def validate(self, loader: Loaders) -> dict[str, float]:
        """Return the loss and the metrics over all samples of all ranks, each counted once. All ranks call it.

        With a dict of loaders, metrics are named "name/metric".
        """
        return self._validation.measure(loader)

    # -- the parts of a checkpoint -------------------------------------------------------------------------------------

    def _make_state(self, loader: FitLoader) -> elastic.State:
        things = {**self.strategy.training_objects(), **({} if loader.sampler is None else {"sampler": loader.sampler})}
        if self.scheduler is not None:
            things["scheduler"] = self.scheduler
        things |= {"why_stopped": "", "saved": (-1, -1), "metrics": {}, "batch_size": loader.batch_size}
        things["next_vote"] = 0  # the step after which the ranks vote on whether to stop
        things["batches"] = 0  # batches of the epoch, if no sampler has a position
        things["data_seeds"] = ()  # of replicas with their own loaders
        things["best"] = ()  # the best values of the metric of keep_best
        things["measured"] = -1, False  # the step of the metrics, and whether they are among the best
        return elastic.State(**things)

    def _parts(self, state: elastic.State) -> dict[str, Any]:
        group, own = self.strategy.checkpoint_group, CallbackStates(self.callbacks)
        return {
            **self.strategy.parts(),
            **({} if self.scheduler is None else {"scheduler": self.scheduler}),
            "callbacks": PerRankState({"callbacks": own}, group, differ=self.strategy.ranks_differ),
            "position": TrainingPosition(state, self._scalars),
            "random": RandomState(group),
        }

    def _save(self, state: elastic.State) -> None:
        if self._manager is None or state.saved == (state.epoch, state.step):
            return
        self._scalars.loggers.flush()  # a run that resumes from here does not write them again
        measured = state.metrics if state.measured[0] == state.step else {}
        self._manager.async_save(state.step, self._parts(state), metrics=measured)
        state.saved = state.epoch, state.step  # a new rank must not save alone a step that others have saved
        self._call("on_checkpoint")
        self._stops.vote(state)  # also if ranks train apart, since a save is collective

    def _restore(self, state: elastic.State, *, from_best: bool) -> None:
        restored = None if self._manager is None else self._manager.load(self._parts(state), best=from_best)
        if from_best and restored is None and not self._dry_run:
            raise ValueError("Trainer.fit: resume='best': there is no checkpoint yet")
        if restored is not None:
            self._display.show_resumed(self, restored.path)
        self._recovery.called_step = state.step
        self.optimizer._opt_called = state.step > 0  # type: ignore[attr-defined]  # otherwise schedulers warn
        group = self.strategy.training_group
        if group is None or not is_joining(group):  # a rank that joins a running job has nothing to undo
            params = collect_hyperparameters(self, state.batch_size, self._settings, self._hyperparameters)
            self._scalars.begin(None if self._manager is None else state.step, params)

    # -- small things --------------------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        stopped = self._state is not None and bool(self._state.why_stopped)
        return stopped or (self.max_steps is not None and self.step >= self.max_steps)

    def _call(self, point: str, *args: Any) -> None:
        self._calls.call(self.callbacks, point, self, *args)

    def _writes(self) -> bool:
        return self.strategy.is_main


class UpdateLoss:
    """`UpdateLoss` accumulates an update's loss: the mean of `pop()` over replicas is the mean over all samples.

    Cost: a multiplication and an addition on the loss's device for each batch, without waiting for the device.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, loss: Tensor, share: float) -> None:
        """Add the loss of a batch with weight `share` in the update's gradient.

        A batch with weight zero may have a NaN loss, which is ignored.
        """
        part = loss.detach() * share if share else torch.zeros_like(loss)
        self._sum = part if self._sum is None else self._sum + part

    def pop(self) -> Tensor:
        """Return this replica's part of the loss, and begin the next update."""
        loss, self._sum = self._sum, None
        assert loss is not None
        return loss


def collect_hyperparameters(
    trainer: Trainer, batch_size: int | None, settings: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return settings by name, as numbers or strings; the user's `own` settings override others.

    `batch_size` is the size of one replica's batch.
    """
    strategy, optimizer = trainer.strategy, trainer.optimizer
    model = strategy.bare_model
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    plain = {name: value for name, value in group.items() if isinstance(value, bool | int | float | str)}
    found = {
        "model": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "strategy": type(strategy).__name__,
        "replicas": strategy.num_replicas_in_sync,
        "batch_size": None if batch_size is None else batch_size * strategy.num_replicas_in_sync,
        "optimizer": type(optimizer).__name__,
        **{f"optimizer/{name}": value for name, value in plain.items()},
        "scheduler": None if trainer.scheduler is None else type(trainer.scheduler).__name__,
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        **settings,
    }
    return {**{name: value for name, value in found.items() if value is not None}, **own}


class Scalars:
    """`Scalars` sends each point of a run's curves to the loggers once, even if steps are lost and repeated.

    It is a checkpoint part: a run that resumes from a checkpoint removes the points logged after it.
    """

    def __init__(self, loggers: GuardedLoggers) -> None:
        self.loggers = loggers
        self._step = 0
        self._latest: dict[str, float] = {}  # the values of that step

    def add(self, values: Mapping[str, float], step: int) -> None:
        here = self._latest if step == self._step else {}
        new = {name: value for name, value in values.items() if name not in here}  # a step may be repeated
        self._latest, self._step = {**here, **new}, step
        if new:
            self.loggers.log_metrics(new, step)

    def begin(self, again_from: int | None, params: Mapping[str, Any]) -> None:
        """Begin or resume the curves. `params` are the settings; `again_from` is as in `Logger.begin`.

        A logger that can remove points also removes the points of the checkpoint's own step, because a validation may
        have followed the save; the checkpoint's values of that step are logged again.
        """
        self.loggers.begin(again_from, params)
        if self._latest and again_from == self._step:
            self.loggers.log_metrics(self._latest, self._step)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "latest": dict(self._latest), "loggers": self.loggers.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the position of the curves, before the loggers begin."""
        self._step, self._latest = state_dict["step"], dict(state_dict["latest"])
        self.loggers.load_state_dict(state_dict["loggers"])


class TrainingPosition:
    """`TrainingPosition` is the checkpoint part with the epoch, the step, the position in the data, and the curves."""

    def __init__(self, state: elastic.State, scalars: Scalars) -> None:
        self._state, self._scalars = state, scalars

    def state_dict(self) -> dict[str, Any]:
        state = self._state
        where = {"epoch": state.epoch, "step": state.step, "data": state.data_position()}
        return where | {
            "batches": state.batches,
            "data_seeds": list(state.data_seeds),
            "best": list(state.best),
            "metrics": dict(state.metrics),
            "scalars": self._scalars.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a position; between two epochs, the data may have another length.

        Raises:
            CheckpointError: the position is inside an epoch over data of another length; nothing has changed.
        """
        state, data = self._state, state_dict["data"]
        here = state.data_position()
        if data and here and data["length"] != here["length"]:
            if data["consumed"]:
                raise CheckpointError(
                    f"the checkpoint is inside epoch {data['epoch'] + 1} over {data['length']} samples, but loader has "
                    f"{here['length']}. Pass the same data to finish that epoch, or train in another folder"
                )
            data = {**here, **{name: data[name] for name in ("epoch", "consumed", "seed", "shuffle") if name in data}}
        state.epoch, state.step = state.saved = state_dict["epoch"], state_dict["step"]
        state.batches = state_dict.get("batches", 0)
        state.data_seeds = tuple(state_dict.get("data_seeds", ()))
        state.best = tuple(state_dict.get("best", ()))
        state.metrics = dict(state_dict["metrics"])
        state.load_data_position(data)
        self._scalars.load_state_dict(state_dict["scalars"])

    def resume_from(self, before: elastic.State) -> None:
        """Continue where the last fit ended, in mid-epoch only if the data has the same length."""
        where = TrainingPosition(before, self._scalars).state_dict()
        data, new = where["data"] or {"consumed": 0}, self._state.data_position() or {"length": -1}
        is_inside_epoch = data["consumed"] and data["length"] == new["length"]
        self.load_state_dict(where if is_inside_epoch else {**where, "data": None})
        self._state.saved = before.saved


_logger = get_logger(__name__)


def agree_on_runs(loggers: GuardedLoggers, peers: Peers) -> None:
    """Send the ids of the loggers' runs to all ranks, since any rank may become rank 0. All ranks call it."""
    states = [state for state in peers.all_gather(loggers.state_dict()) if state]
    if states:
        loggers.load_state_dict(states[0])


def end_loggers(loggers: GuardedLoggers, error: BaseException | None, *, writes: bool) -> None:
    """Log the current report, if there is one, and end the loggers with the result of the fit."""
    if not (loggers and writes):
        return
    folder = recording.current_folder()
    if folder:
        from phalanx._job.report.write import write_page_so_far

        with tempfile.TemporaryDirectory() as scratch:
            path = os.path.join(scratch, "report.html")
            try:
                write_page_so_far(folder, path)
            except Exception as problem:  # must not hide the result, or the error, of the fit
                _logger.warning("Trainer: no report for the loggers: %s: %s", type(problem).__name__, problem)
            else:
                loggers.log_file(path)
    loggers.finalize(
        "success" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    )


def make_scheduler(
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None,
    optimizer: Optimizer,
    strategy: Strategy,
    interval: Literal["epoch", "step"],
) -> LRScheduler | None:
    """Return the scheduler, or None. `optimizer` trains; `strategy` may have made it from the user's optimizer.

    Raises:
        ValueError: the scheduler belongs to another optimizer, or can't step with each update.
    """
    if scheduler is None:
        return None
    if not isinstance(scheduler, LRScheduler):
        made = scheduler(optimizer)
    elif scheduler.optimizer is optimizer:
        made = scheduler
    else:
        kind = type(scheduler).__name__
        raise ValueError(
            f"Trainer: the {kind} does not use the optimizer that trains, which {type(strategy).__name__} created: "
            f"give a function, scheduler=lambda optimizer: {kind}(optimizer, ...)"
        )
    if isinstance(made, ReduceLROnPlateau) and interval == "step":
        raise ValueError("Trainer: ReduceLROnPlateau steps by the validation's loss: scheduler_interval='epoch'")
    return made


def step_scheduler(scheduler: LRScheduler, metrics: Mapping[str, float]) -> None:
    """Step the scheduler at the end of an epoch; `metrics` come from its validation.

    Raises:
        ValueError: the scheduler needs the loss, which was not measured.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        if "loss" not in metrics:
            raise ValueError(f"Trainer: ReduceLROnPlateau needs the metric 'loss', but the metrics are {[*metrics]}")
        scheduler.step(metrics["loss"])
    else:
        scheduler.step()
