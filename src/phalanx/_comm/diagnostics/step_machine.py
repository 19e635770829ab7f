"""Turn a rank's events into training steps, with the time of each phase.

This code is pure, so the events that a killed rank has left in its file give the same steps.

    data ─▶ forward and loss ─▶ backward ─▶ update ─▶ other ─▶ data ...
         │                   │           │         │
         the DataLoader      autograd    autograd  the optimizer's step
         has a batch         is called   is done   is done

The time between two events belongs to the phase that the later event ends: forward is the time from a batch to the
backward, update the time from the end of the backward to the end of the optimizer's step (with clipping). A batch
without a backward was for evaluation: its time is `other`, like all time outside of these phases. Waits for other ranks
that a feature reports (`step_notes`) belong to no phase. A step ends with its last update, which is known once the next
batch is requested; without a DataLoader, a step ends with the update before the next backward. An update without a
batch or a backward before it is not part of a step: some programs try out an optimizer before the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

OTHER, DATA, FORWARD, BACKWARD, UPDATE = range(5)
PHASES = ("other", "data", "forward", "backward", "update")
_WAITED = len(PHASES)  # the index of waits among the parts; a wait is not a phase, but occurs inside a phase

# Events, with their values.
(BEGIN_DATA, END_DATA, NO_DATA,  # nothing; samples; nothing
 BEGIN_BACKWARD, END_BACKWARD, END_BACKWARD_WITH_LOSS,  # nothing; nothing; loss
 BEGIN_UPDATE, END_UPDATE,  # which optimizer; nothing
 END_PHASE, SAMPLES, OWN_LOSS, NO_LOSS, STEP,  # phase; samples; loss; nothing; nothing
 END_WAIT) = range(14)  # seconds  # fmt: skip
WORKERS = 16  # END_DATA + WORKERS * (num_workers + 1) is an END_DATA that has the DataLoader's number of workers

_NUM_MARKS = 1024  # marks of phases kept: an operation before the oldest counts as `other`
# the maximum number of a step's optimizers in a saved state; some programs have one for each parameter
_MOST_OPTIMIZERS = 64


class FinishedStep(NamedTuple):
    """A `FinishedStep` has its begin and end, by CLOCK_MONOTONIC, and as `parts` its time in each phase and in waits.

    All times are in seconds.
    """

    begin: float
    end: float
    parts: Sequence[float]
    samples: float
    loss: float | None


class StepMachine:
    """A `StepMachine` processes the events of one process. `now` is the time of its creation.

    Arguments:
        on_step: called with each finished step, during the event that shows that the step is over.
    """

    def __init__(self, now: float, on_step: Callable[[FinishedStep], None]) -> None:
        self._on_step = on_step
        self.phase, self.num_workers = OTHER, -1
        # the time in nanoseconds at which each phase began, and the phase
        self.marks: deque[tuple[int, int]] = deque([(0, OTHER)], maxlen=_NUM_MARKS)
        self._parts = [0.0] * (len(PHASES) + 1)
        self.since = self._begin = self._updated_at = now
        self._batch_s = 0.0  # the loading time of a batch that may be for training or for evaluation
        self._batch_samples = 0.0
        self._has_batch = self._has_update = self._has_loader = self._has_begun = False
        self._has_backward = self._has_ended_one = False
        self._stepped: set[float] = set()  # the optimizers that have stepped in this step
        # The step at its latest update, which may have been its last: parts, samples, loss, time.
        self._split: tuple[list[float], float, float | None, float] | None = None
        self._samples = 0.0
        self._loss: float | None = None
        self._is_own_loss = False
        self._open: list[int] = []  # the open phases, each inside the previous one
        self._updating = 0.0  # the optimizer of the outermost open update
        self._events: tuple[Callable[[float, float], None], ...] = (
            self._begin_data, self._end_data, self._no_data,
            self._begin_backward, self._end_backward, self._end_backward_with_loss,
            self._begin_update, self._end_update,
            self._end_phase, self._set_samples, self._own_loss, self._no_loss, self._step, self._end_wait,
        )  # fmt: skip

    def feed(self, kind: float, now: float, value: float) -> None:
        event = int(kind)
        if event >= WORKERS:
            self.num_workers, event = divmod(event, WORKERS)
            self.num_workers -= 1
        self._events[event](now, value)

    def end(self) -> None:
        """End the last step, if it has had an update, because no more events will come."""
        if self._has_update:
            self._end_step()

    # -- the state for a reader ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state for `resume`, as values for JSON."""
        state = {name: value for name, value in vars(self).items() if name not in ("_on_step", "_events", "marks")}
        state["_stepped"] = list(self._stepped)[:_MOST_OPTIMIZERS]
        state["_open"] = self._open[:_MOST_OPTIMIZERS]
        return state

    @classmethod
    def resume(cls, state: Mapping[str, Any], on_step: Callable[[FinishedStep], None]) -> StepMachine:
        machine = cls(0.0, on_step)
        vars(machine).update({name: value for name, value in state.items() if name in vars(machine)})
        machine._stepped = set(machine._stepped)
        return machine

    # -- events --------------------------------------------------------------------------------------------------------

    def _begin_data(self, now: float, _: float) -> None:
        if UPDATE in self._open:  # an optimizer that raised has not recorded its end
            self._open.clear()
        if not self._enters(DATA):
            return
        if self._has_update:
            self._end_step()
        if self._batch_s:  # the time since that batch was not a forward
            at = int(now * 1e9)
            while self.marks and self.marks[-1][1] in (FORWARD, DATA):
                at, _ = self.marks.pop()
            self.marks.append((at, OTHER))
        self._parts[OTHER] += now - self.since + self._batch_s
        self._batch_s = self._batch_samples = 0.0
        self._turn_to(DATA, now)

    def _end_data(self, now: float, samples: float) -> None:
        if self._leaves():
            self._batch_s, self._batch_samples = now - self.since, samples
            self._turn_to(FORWARD, now)

    def _no_data(self, now: float, _: float) -> None:
        if self._leaves():
            self._parts[DATA] += now - self.since
            self._turn_to(OTHER, now)

    def _begin_backward(self, now: float, _: float) -> None:
        self._has_backward = True
        if not self._enters(BACKWARD):
            return
        if self._has_update and not (self._has_batch or self._batch_s):
            self._has_loader = False
            self._end_step()
        elif self._has_update:  # a backward for another optimizer, or for the next step with the same batch
            self._split = (list(self._parts), self._samples, self._loss, self._updated_at)
        self._has_backward = True
        self._count_batch()
        self._parts[FORWARD] += now - self.since
        self._turn_to(BACKWARD, now)

    def _end_backward(self, now: float, _: float) -> None:
        if self._leaves():
            self._parts[BACKWARD] += now - self.since
            self._turn_to(UPDATE, now)

    def _end_backward_with_loss(self, now: float, loss: float) -> None:
        if self._leaves():
            self._parts[BACKWARD] += now - self.since
            self._turn_to(UPDATE, now)
            if not self._is_own_loss:
                self._loss = loss + (self._loss or 0.0)

    def _begin_update(self, now: float, optimizer: float) -> None:
        """Begin an update; if this optimizer has already stepped in this step, this update belongs to the next step."""
        if self._open and self._open[0] == UPDATE and self._updating == optimizer:
            self._open.clear()  # the optimizer raised in its last step
        if not self._enters(UPDATE):
            return
        self._updating = optimizer
        self._count_batch()
        if optimizer in self._stepped and self._split is not None:
            self._end_step_before(*self._split)
        self._stepped.add(optimizer)
        self._parts[UPDATE] += now - self.since
        self._turn_to(UPDATE, now)

    def _end_update(self, now: float, _: float) -> None:
        if self._leaves():
            self._parts[UPDATE] += now - self.since
            is_of_step = self._has_update = self._has_update or self._has_batch or self._has_backward
            if is_of_step:
                self._updated_at = now
            self._turn_to(OTHER if self._has_loader else FORWARD, now)
            if not is_of_step and not self._has_ended_one:
                self._has_begun = False

    def _end_phase(self, now: float, phase: float) -> None:
        """Count the time since the last event as time in `phase`."""
        self._parts[int(phase)] += now - self.since
        self._turn_to(OTHER, now)

    def _set_samples(self, _: float, samples: float) -> None:
        self._samples, self._batch_samples = samples, 0.0

    def _own_loss(self, _: float, loss: float) -> None:
        """Set the step's loss, which replaces the value of the tensor on which `backward` was called."""
        self._loss, self._is_own_loss = loss, True

    def _no_loss(self, _: float, __: float) -> None:
        self._loss, self._is_own_loss = None, True

    def _step(self, now: float, _: float) -> None:
        """End a step here, whatever events it had."""
        self._count_batch()
        self._end_phase(now, OTHER)
        self._updated_at = now
        self._end_step()

    def _end_wait(self, now: float, seconds: float) -> None:
        """Exclude the last `seconds` from the current phase, whichever it is."""
        waited = min(max(0.0, seconds), max(0.0, now - self.since))
        self._parts[_WAITED] += waited
        self.since += waited

    # -- inside --------------------------------------------------------------------------------------------------------

    def _enters(self, phase: int) -> bool:
        """Open a phase, and return whether it counts: a phase inside another phase does not."""
        self._open.append(phase)
        return len(self._open) == 1

    def _leaves(self) -> bool:
        if not self._open:
            return False
        self._open.pop()
        return not self._open

    def _turn_to(self, phase: int, now: float) -> None:
        if not self._has_begun:  # the time before was the program's startup
            self._has_begun, self._begin, self._parts = True, now, [0.0] * (len(PHASES) + 1)
        self.since, self.phase = now, phase
        self.marks.append((int(now * 1e9), phase))

    def _count_batch(self) -> None:
        """Count the batch, if there is one, as a training batch."""
        if self._batch_s:
            self._has_batch = self._has_loader = True
            self._parts[DATA] += self._batch_s
            self._samples += self._batch_samples
            self._batch_s = self._batch_samples = 0.0

    def _end_step(self) -> None:
        """End the step, at the time of its last update."""
        end = self._updated_at
        self._on_step(FinishedStep(self._begin, end, self._parts, self._samples, self._loss))
        self._parts = [0.0] * (len(PHASES) + 1)
        self._begin, self._samples = end, 0.0
        self._loss, self._is_own_loss = None, False
        self._has_update = self._has_batch = self._has_backward = False
        self._has_ended_one = True
        self._stepped.clear()
        self._split = None

    def _end_step_before(self, parts: list[float], samples: float, loss: float | None, updated_at: float) -> None:
        """End the step, at the time of an earlier update; later time belongs to the next step."""
        since = [now - then for now, then in zip(self._parts, parts, strict=True)]
        loss_since = None if self._loss is None else self._loss - (loss or 0.0)
        self._parts, self._samples, self._loss = parts, samples, loss
        self._updated_at = updated_at
        self._end_step()
        self._parts, self._loss = since, loss_since
        self._has_backward, self._has_loader = True, False
