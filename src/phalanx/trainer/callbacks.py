"""A `Callback` runs user code at points of `Trainer.fit`; `EarlyStopping` is one."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from phalanx import elastic
from phalanx._base.log import get_logger
from phalanx._comm.backend import rendezvous
from phalanx.checkpoint.best import Best
from phalanx.checkpoint.peers import Peers
from phalanx.elastic import generator_states
from phalanx.strategies import Strategy

if TYPE_CHECKING:
    from phalanx.trainer.trainer import Trainer


_logger = get_logger(__name__)


class Callback:
    """Override the points that you need. All ranks call each point, in the order of the Trainer's `callbacks`.

        on_fit_begin            model and optimizer are set up, and a checkpoint is loaded if one exists
          on_epoch_begin        trainer.epoch is the coming epoch
            on_step_end         an update is done and counted: trainer.step
            on_checkpoint       a save of trainer.step has begun
          on_validation_end     trainer.metrics has the results
          on_epoch_end
        on_fit_end              also after an early stop
        on_error                instead of on_fit_end

    Checkpoints contain the state of each callback with `state_dict` and `load_state_dict`: rank 0's state for all
    ranks, or each rank's own if ranks have different models (parts of one, or copies that train apart). A replacement
    rank receives another rank's state. After the loss of a rank, the points after the last step of an epoch are
    repeated, with callbacks restored to that step. Random numbers that a callback draws (torch, Python, NumPy) do not
    affect the model's. So a resumed run, which repeats some points but not others, ends bitwise identical, and a seed
    that a callback sets is in effect only until the point ends.
    """

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Override this to act before the first step."""

    def on_epoch_begin(self, trainer: Trainer) -> None:
        """Override this to act before the first batch of an epoch, or of the rest of an epoch after resuming."""

    def on_step_end(self, trainer: Trainer, loss: Tensor) -> None:
        """Override this to act after a step. `loss` is this rank's, detached; reading it waits for the device."""

    def on_checkpoint(self, trainer: Trainer) -> None:
        """Override this to act when a save has begun. It completes before the next save begins, or `fit` returns."""

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Override this to act after a validation. `metrics` cover all samples of all ranks; all ranks get the same."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Override this to act after the validation and the scheduler's step."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Override this to act after the last step, when the last checkpoint is written."""

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """Override this to act when `fit` ends with `error`."""


class EarlyStopping(Callback):
    """Stop when `monitor` has not improved for `patience` validations.

    Arguments:
        monitor: the name of a validation metric. By default the loss, or if `mode` is not given either, the metric and
            mode of the Trainer's `keep_best`.
        min_delta: a change counts as an improvement only if it is larger than this.
        mode: "min" (the default) if lower is better, "max" if higher is better.

    Raises:
        ValueError: an argument is invalid; from `fit`, the metric does not exist.
    """

    def __init__(
        self,
        monitor: str | None = None,
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        self._follows = monitor is None and mode is None
        monitor, mode = "loss" if monitor is None else monitor, "min" if mode is None else mode
        if mode not in ("min", "max"):
            raise ValueError(f"EarlyStopping: mode must be 'min' or 'max', got {mode!r}")
        if patience < 1:
            raise ValueError(f"EarlyStopping: patience must be 1 or more validations, got {patience}")
        self.patience, self.min_delta = patience, min_delta
        self.num_bad = 0
        self._watch(monitor, mode)

    def follow(self, best: Best | None) -> None:
        """Watch the metric of `keep_best`, unless `monitor` or `mode` was given."""
        if self._follows and best is not None:
            self._watch(best.metric, best.mode)

    def _watch(self, monitor: str, mode: Literal["min", "max"]) -> None:
        self.monitor, self.mode = monitor, mode
        self.best = math.inf if mode == "min" else -math.inf

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Stop again if this callback had stopped the run before a restart."""
        self._stop_if_due(trainer)

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Stop the trainer after `patience` validations without improvement."""
        if self.monitor not in metrics:
            raise ValueError(f"EarlyStopping: {self.monitor!r} is not a metric of the validation: {sorted(metrics)}")
        value = metrics[self.monitor]
        better = value < self.best - self.min_delta if self.mode == "min" else value > self.best + self.min_delta
        self.best, self.num_bad = (value, 0) if better else (self.best, self.num_bad + 1)
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: Trainer) -> None:
        if self.num_bad >= self.patience:
            trainer.stop(f"{self.monitor} has not improved on {self.best:.6g} for {self.num_bad} validations")

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and the number of validations since then."""
        return {"best": self.best, "num_bad": self.num_bad}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting from a saved state."""
        self.best, self.num_bad = state_dict["best"], state_dict["num_bad"]


class LambdaCallback(Callback):
    """Use functions instead of a class: `LambdaCallback(on_step_end=lambda trainer, loss: ...)`."""

    def __init__(self, **points: Callable[..., None]) -> None:
        for name, function in points.items():
            if not name.startswith("on_") or not hasattr(Callback, name):
                raise ValueError(f"LambdaCallback: Callback has no method {name!r}")
            setattr(self, name, function)


class CallbackStates:
    """`CallbackStates` is the checkpoint part with the states of callbacks, by name.

    A checkpoint may lack a callback's state, or have the state of a callback that no longer exists.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks: dict[str, Any] = {}
        for one in callbacks:
            if hasattr(one, "state_dict") and hasattr(one, "load_state_dict"):
                kind = type(one).__qualname__
                number = sum(name.startswith(f"{kind} ") for name in self._callbacks)
                self._callbacks[f"{kind} {number}"] = one

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self._callbacks.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of each callback; a callback without a state stays as it is."""
        if differing := sorted(state_dict.keys() ^ self._callbacks.keys()):
            _logger.warning(
                "Trainer: no state was loaded for %s, which only one of the checkpoint and callbacks= has",
                ", ".join(differing),
            )
        for name in state_dict.keys() & self._callbacks.keys():
            self._callbacks[name].load_state_dict(state_dict[name])


class CallbackCalls:
    """`CallbackCalls` calls callbacks so that their random draws do not affect the model's.

    A resumed run repeats some points but not others, and must still end bitwise identical.

    Cost: two captures of the random states for each point that a callback overrides.
    """

    def __init__(self) -> None:
        self._random = generator_states.GeneratorStates()

    def has_any(self, callbacks: Sequence[Callback], point: str) -> bool:
        return any(_overrides(one, point) for one in callbacks)

    def call(self, callbacks: Sequence[Callback], point: str, *args: Any) -> None:
        """Call the method `point` of each callback that overrides it, in the order of the callbacks."""
        receivers = [one for one in callbacks if _overrides(one, point)]
        if not receivers:
            return
        before = self._random.capture()
        for callback in receivers:
            getattr(callback, point)(*args)
        if self._random.capture() != before:
            generator_states.restore(before)


def _overrides(callback: Callback, point: str) -> bool:
    return point in vars(callback) or getattr(type(callback), point) is not getattr(Callback, point)


class CallbackRecovery:
    """`CallbackRecovery` restores callbacks after the loss of a rank: all ranks' callbacks continue from one step.

    `called_step` is the latest step whose `on_step_end` has completed.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.called_step = 0
        self._saved: tuple[int, bytes] | None = None  # an epoch, and the callbacks' states after its last step

    def save(self, callbacks: CallbackStates, state: elastic.State) -> None:
        """Save the states after the last step of an epoch: if a rank is lost, all later points are repeated."""
        if rendezvous.agent_address() and callbacks:
            self._saved = state.epoch, pickle.dumps(callbacks.state_dict())

    def agree(self, callbacks: CallbackStates, state: elastic.State) -> None:
        """Restore the callbacks to the latest step when training begins or resumes. All ranks call it.

        A rank that has joined, or has not completed that step's `on_step_end`, receives another rank's states.
        """
        saved, self._saved = self._saved, None
        if not (self._strategy.is_elastic and callbacks):
            return
        if saved is not None and saved[0] == state.epoch:
            callbacks.load_state_dict(pickle.loads(saved[1]))
        peers = Peers(self._strategy.training_group)
        have_completed = peers.all_gather(self.called_step == state.step)
        if any(have_completed) and not all(have_completed):
            states = peers.broadcast(callbacks.state_dict(), src=have_completed.index(True))
            if not have_completed[peers.rank]:
                callbacks.load_state_dict(states)
        self.called_step = state.step
