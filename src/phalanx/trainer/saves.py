"""Decide when a Trainer saves: every few updates or epochs, and after the best validations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.checkpoint.best import Best, KeepBest

SaveEvery = int | Literal["epoch"] | tuple[Literal["epochs"], int]
Resume = Literal["latest", "best"]


@dataclass(frozen=True)
class Saves:
    """`Saves` saves a checkpoint every `steps` updates, or every `epochs` epochs, and after each of the best epochs."""

    steps: int | None = None
    epochs: int | None = 1
    best: Best | None = None

    @classmethod
    def of(cls, save_every: SaveEvery | None, keep_best: KeepBest | None) -> Saves:
        """Return the `Saves` for a Trainer's arguments.

        Raises:
            ValueError: the arguments are invalid.
        """
        best = None if keep_best is None else Best.of(keep_best)
        if save_every is None or save_every == "epoch":
            return cls(best=best)
        if is_count(save_every):
            assert isinstance(save_every, int)
            return cls(save_every, None, best)
        if isinstance(save_every, (tuple, list)) and len(save_every) == 2:
            unit, count = save_every
            if unit == "epochs" and is_count(count):
                return cls(None, count, best)
        raise ValueError(
            f"save_every must be 1 or more updates, 'epoch', or epochs as in ('epochs', 5), got {save_every!r}"
        )

    def is_due_at_step(self, step: int) -> bool:
        return self.steps is not None and step % self.steps == 0

    def is_due_at_epoch(self, epoch: int) -> bool:
        return self.epochs is not None and epoch % self.epochs == 0

    def judge(self, kept: tuple[float, ...], metrics: dict[str, float]) -> tuple[tuple[float, ...], bool]:
        """Add the metric of a validation to the best values `kept`; return them, and whether it is among the best.

        Raises:
            ValueError: the metric was not measured.
        """
        if self.best is None:
            return kept, False
        if self.best.metric not in metrics:
            raise ValueError(
                f"Trainer: keep_best: {self.best.metric!r} is not a metric of the validation: {sorted(metrics)}"
            )
        return self.best.add(kept, metrics[self.best.metric])


def is_count(value: object) -> bool:
    """Return whether `value` is an int of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
