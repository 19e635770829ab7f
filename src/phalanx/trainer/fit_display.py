"""Print on rank 0 what happens in a fit: where it resumes, its epochs, validations and warnings, why it ends."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx._base.log import get_logger
from phalanx.trainer.progress_display import Progress, progress, values_text

if TYPE_CHECKING:
    from phalanx.trainer.trainer import Trainer

_logger = get_logger(__name__)


class FitDisplay:
    """`FitDisplay` shows on rank 0 where a fit resumes, its epochs and validations, and why it ended.

    Cost: an addition on the loss's device for each batch; the sum is read when a line is drawn. On the CPU, each loss
    is read at once, so that a warning can name the step whose loss is NaN or infinite.
    """

    def __init__(self, *, show: bool) -> None:
        self._show = show
        self._bar: Progress[Any] | None = None
        self._mean = RunningMean()
        self._epoch = ""
        self._has_warned = False

    def print_line(self, line: str) -> None:
        if self._show and _is_first():
            print(line, flush=True)

    def batches(self, loader: Iterable[Any], epoch: str, per_step: Callable[[Any], float]) -> Iterable[Any]:
        """Return an iterable over the batches of `loader` that also shows its progress in one line."""
        self._epoch, self._mean = epoch, RunningMean()
        self._bar = progress(loader, desc=epoch, per_step=per_step) if self._show else None
        return loader if self._bar is None else self._bar

    def add_loss(self, loss: Tensor, step: int) -> None:
        """Show the loss of the current batch, which is part of update `step`."""
        value = self._mean.add(loss)
        if self._bar is not None:
            self._bar.update(**{"mean loss": self._mean})
        if value is not None and not math.isfinite(value):
            self._warn_if_broken(value, f"at step {step}")

    def end_epoch(self) -> None:
        """End the epoch with the current batch."""
        if self._bar is not None:
            self._bar.end()
        if self._mean.is_elsewhere:  # the losses were not checked step by step
            self._warn_if_broken(float(self._mean), f"in {self._epoch}")

    def show_metrics(self, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a validation, after an epoch's batches."""
        if self._epoch:  # empty if a restarted run was already finished, and only validates
            self.print_line(f"{self._epoch}: validation: {values_text(metrics)}")

    def show_resumed(self, trainer: Trainer, path: Path | str) -> None:
        """Show that a checkpoint was loaded."""
        place = f"in epoch {trainer.epoch + 1}" if trainer.epoch < trainer.max_epochs else f"epoch {trainer.epoch}"
        self.print_line(f"resumes from {path}, after step {trainer.step}, {place}")

    def show_finished(self, trainer: Trainer, folder: Path | str) -> None:
        """Show that the run was already finished."""
        what, advice = _why_over(trainer)
        whose = f"{folder} has a finished run" if folder else "this run is finished"
        self.print_line(f"{whose} ({what}): nothing to train; {advice}{', or pass another folder' if folder else ''}")

    def show_end(self, trainer: Trainer) -> None:
        """Show why the training has ended, unless it reached `max_epochs`."""
        if trainer.why_stopped or trainer.epoch < trainer.max_epochs:
            what, _ = _why_over(trainer)
            self.print_line(
                f"stopped after step {trainer.step}, {trainer.epoch} of {trainer.max_epochs} epochs: {what}"
            )

    def show_preempted(self, folder: Path | str) -> None:
        """Show, after a SIGTERM, where the next run will resume, and the exit code for the scheduler."""
        where = f"saved in {folder}: the same command resumes there" if folder else "nothing is saved: pass checkpoint="
        self.print_line(f"{where}; exit code {os.EX_TEMPFAIL} (EX_TEMPFAIL)")

    def show_interrupted(self, trainer: Trainer, saved_step: int | None) -> None:
        """Show, after Ctrl-C, where the next run will resume."""
        where = f"the last checkpoint is from step {saved_step}: the same command resumes there"
        self.print_line(
            f"stopped at step {trainer.step}; {where if saved_step is not None else 'there is no checkpoint'}"
        )

    def _warn_if_broken(self, loss: float, when: str) -> None:
        if math.isfinite(loss) or self._has_warned or not _is_first():
            return
        self._has_warned = True
        _logger.warning(
            "Trainer: the loss is %s %s: lower the learning rate, clip the gradients (max_norm), and check the batch "
            "of that step. This is logged once",
            loss,
            when,
        )


class RunningMean:
    """`RunningMean` is the mean of the added values. Values on an accelerator are read only on request."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._elsewhere: Tensor | None = None
        self._count = 0

    def add(self, value: Tensor) -> float | None:
        """Add a value; return it as a number if it is on the CPU."""
        self._count += 1
        if value.is_cpu:  # add it as a float: a tensor operation would cost tens of microseconds
            number = float(value.item())
            self._sum += number
            return number
        if self._elsewhere is None:
            self._elsewhere = torch.zeros((), dtype=torch.float64, device=value.device)
        self._elsewhere.add_(value.detach().reshape(()))
        return None

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the sum is on a device other than the CPU."""
        return self._elsewhere is not None

    def __float__(self) -> float:
        if self._count == 0:
            return math.nan
        return (self._sum if self._elsewhere is None else float(self._elsewhere)) / self._count


def _why_over(trainer: Trainer) -> tuple[str, str]:
    """Return why the training has ended, and how to continue it."""
    if trainer.why_stopped:
        return trainer.why_stopped, "remove the callback that stops it"
    if trainer.max_steps is not None and trainer.step >= trainer.max_steps:
        return f"max_steps={trainer.max_steps}", "raise max_steps"
    return f"max_epochs={trainer.max_epochs}", "raise max_epochs"


def _is_first() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
