"""Where the time of each training step goes, as the rank itself sees it.

    data ─▶ forward and loss ─▶ backward ─▶ update ─▶ other ─▶ data ...
         │                   │           │         │
         the DataLoader      autograd    autograd  the optimizer's step
         has a batch         is called   is done   is done

The time between two events belongs to what the later one ends: that from a batch to the backward is the forward's, that
from the backward to the end of the optimizer's step the update's (clipping, too). A batch that no backward follows was
one for evaluation: it is `other`, like what lies outside of all these. A step ends with its last update, which the next
batch tells; where there is no DataLoader, with the update before the next backward.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from phalanx.diagnostics.operation_sampler import OperationSampler
from phalanx.diagnostics.progress_page import own_generation, own_step
from phalanx.diagnostics.step_file import BACKWARD, DATA, FORWARD, OTHER, PHASES, UPDATE, StepFile, StepRecord, merge
from phalanx.diagnostics.whereabouts import ObservedGroup, listen_for_ends, stop_listening

_NUM_MARKS = 1024  # of phases: as far back as operations are assigned to one
_LOOK_S = 0.5  # between two looks at the process's memory
_LOSS_S = 1.0  # between two losses that have to be waited for
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Split:
    """A step as it was at its latest update, which may have been its last."""

    parts: list[float]
    samples: float
    loss: float | None
    updated_at: float


class StepRecorder:
    """One for a process, told by one thread. An event is a few stores, a step some ten microseconds in all.

    Arguments:
        path: of the file that is made.
        facts: what is known of the rank; more may be told later.

    Raises:
        OSError: the file can't be made.
    """

    def __init__(self, path: str, facts: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        now = clock()
        self._file = StepFile(path, now, time.time() - now)
        self._facts = dict(facts)
        self._file.set_facts(self._facts)
        self._operations = OperationSampler(self._file, lambda groups: self.tell(groups=groups))
        listen_for_ends(self.end_group)
        self.rank = int(self._facts.get("rank", 0))
        self.sample_share = 1.0
        """What a sample counts on this rank, where several ranks hold the parts of one model and see the same."""
        self.device_memory: Callable[[], float] = float
        self.rank_now: Callable[[], int] = lambda: self.rank
        """Asked when the ranks have formed their group anew: this one may have got another number."""
        self.on_first_step: Callable[[StepRecorder], None] = lambda recorder: None
        self._parts = [0.0] * len(PHASES)
        self._since = self._begin = self._updated_at = now
        self._batch_s = 0.0  # a batch of which nobody knows yet whether it is for training
        self._batch_samples = 0.0
        self._has_batch = self._has_update = self._has_loader = self._has_begun = False
        self._stepped: set[int] = set()  # optimizers, in this step
        self._split: _Split | None = None
        self._samples = 0.0
        self._loss: float | None = None
        self._is_own_loss = False
        self._loss_due = 0.0
        self._num_steps = 0
        self._ahead: int | None = None  # what the run's number of a step is more than this process's; None: not known
        self._open: list[int] = []  # phases, each inside of the one before
        self._marks: deque[tuple[int, int]] = deque([(0, OTHER)], maxlen=_NUM_MARKS)
        self._pending: StepRecord | None = None
        self._looked = self._cost_s = 0.0
        self._process = (0.0, 0.0, 0.0, 0.0, 0.0)  # resident, shared, time on processors, preemptions, device

    # -- events --------------------------------------------------------------------------------------------------------

    def begin_data(self) -> None:
        """A batch is asked for."""
        if UPDATE in self._open:  # an optimizer that raised has not told of its end
            self._open.clear()
        if not self._enters(DATA):
            return
        now = self._clock()
        if self._has_update:
            self._end_step()
        if self._batch_s:  # what ran since then was no forward of a step
            at = int(now * 1e9)
            while self._marks and self._marks[-1][1] in (FORWARD, DATA):
                at, _ = self._marks.pop()
            self._marks.append((at, OTHER))
        self._parts[OTHER] += now - self._since + self._batch_s
        self._batch_s = self._batch_samples = 0.0
        self._turn_to(DATA, now)

    def end_data(self, samples: float | None) -> None:
        """The batch is there, with so many samples; None: there is none any more."""
        if not self._leaves():
            return
        now = self._clock()
        if samples is None:
            self._parts[DATA] += now - self._since
            self._turn_to(OTHER, now)
            return
        self._batch_s, self._batch_samples = now - self._since, samples
        self._turn_to(FORWARD, now)

    def begin_backward(self) -> None:
        """Autograd is called."""
        if not self._enters(BACKWARD):
            return
        now = self._clock()
        if self._has_update and not (self._has_batch or self._batch_s):
            self._has_loader = False
            self._end_step()
        elif self._has_update:  # of another optimizer, or of the next step, with the same batch
            self._split = _Split(list(self._parts), self._samples, self._loss, self._updated_at)
        self._take_batch()
        self._parts[FORWARD] += now - self._since
        self._turn_to(BACKWARD, now)

    def end_backward(self, loss: float | None) -> None:
        """Autograd is done; `loss` is what it began from, where that is known."""
        if not self._leaves():
            return
        now = self._clock()
        self._parts[BACKWARD] += now - self._since
        self._turn_to(UPDATE, now)
        if loss is not None and not self._is_own_loss:
            self._loss = loss + (self._loss or 0.0)

    def begin_update(self, optimizer: int = 0) -> None:
        """The optimizer with this number steps. If it has stepped before, that was another step."""
        if self._enters(UPDATE):
            now = self._clock()
            self._take_batch()
            if optimizer in self._stepped and self._split is not None:
                self._end_step_before(self._split)
            self._stepped.add(optimizer)
            self._parts[UPDATE] += now - self._since
            self._turn_to(UPDATE, now)

    def end_update(self) -> None:
        """It has stepped."""
        if not self._leaves():
            return
        now = self._clock()
        self._parts[UPDATE] += now - self._since
        self._has_update, self._updated_at = True, now
        self._turn_to(OTHER if self._has_loader else FORWARD, now)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What a loop does by itself, by one of the names in `PHASES`."""
        if name not in PHASES:
            raise ValueError(f"phase: {name!r} is none of {', '.join(PHASES)}")
        if name == "data":
            self.begin_data()
        elif name == "backward":
            self.begin_backward()
        elif name == "update":
            self.begin_update()
        else:
            self._add(OTHER)
        try:
            yield
        finally:
            if name == "data":
                self.end_data(0.0)
            elif name == "backward":
                self.end_backward(None)
            elif name == "update":
                self.end_update()
            else:
                self._add(PHASES.index(name))

    def step(self, samples: float | None = None, loss: float | None = None) -> None:
        """A step ends here, whatever was seen of it."""
        if threading.get_ident() != self._thread:
            return
        if samples is not None:
            self._samples, self._batch_samples = samples, 0.0
        if loss is not None:
            self.note_loss(loss)
        self._take_batch()
        self._add(OTHER)
        self._updated_at = self._since
        self._end_step()

    def read_loss(self, loss: Any) -> float | None:
        """The value of a tensor of one element. On an accelerator that waits for it: once a second is enough.

        None where a CUDA graph is captured, which a wait would end: nothing runs there, so there is no value.
        """
        if loss.device.type == "cuda" and sys.modules["torch"].cuda.is_current_stream_capturing():
            return None
        loss = getattr(loss, "unscaled_loss", loss)  # before a GradScaler's factor
        if loss.device.type != "cpu":
            now = self._clock()
            if now < self._loss_due:
                return None
            self._loss_due = now + _LOSS_S
        try:
            return float(loss.detach())
        except Exception:  # a tensor without a value, of a tracer
            return None

    def note_loss(self, loss: float | None) -> None:
        """What the step's loss is, in place of what the backward began from; None if it is not known."""
        self._loss, self._is_own_loss = loss, True

    # -- facts ---------------------------------------------------------------------------------------------------------

    def tell(self, **facts: Any) -> None:
        """What is known of this rank, or of the run, besides."""
        if self._thread == -1:
            return
        self._facts.update(facts)
        self._file.set_facts(self._facts)

    def set_num_workers(self, number: int) -> None:
        """How many workers the DataLoader has that has just given a batch."""
        if threading.get_ident() != self._thread:
            return
        self._file.set_num_workers(number)

    def end_group(self, group: ObservedGroup) -> None:
        """This process is about to leave a group."""
        if threading.get_ident() == self._thread:
            self._operations.read_group(group, list(self._marks), self._num_steps)

    @property
    def facts(self) -> Mapping[str, Any]:
        """What is known of the rank."""
        return self._facts

    @property
    def num_steps(self) -> int:
        """How many are done."""
        return self._num_steps

    def forget(self) -> None:
        """This process is a fork of the one that records: it writes nothing."""
        self._thread = -1

    def close(self, *, ended: bool) -> None:
        """Write what there is; `ended`: the process comes to its end in order."""
        if self._thread == -1:
            return
        if self._has_update:
            self._end_step()
        if self._pending is not None:
            self._file.add_step(array("d", self._pending))
            self._pending = None
        self._look(self._clock())
        self._read_operations()
        if ended:
            self._file.set_ended()
        self._thread = -1
        stop_listening(self.end_group)
        self._file.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _enters(self, phase: int) -> bool:
        """Whether this begins a phase: what another phase does inside of itself, or another thread, does not."""
        if threading.get_ident() != self._thread:
            return False
        self._open.append(phase)
        return len(self._open) == 1

    def _leaves(self) -> bool:
        """Whether this ends one."""
        if threading.get_ident() != self._thread or not self._open:
            return False
        self._open.pop()
        return not self._open

    def _add(self, phase: int) -> None:
        """The time since the last event was this phase's."""
        if threading.get_ident() != self._thread:
            return
        now = self._clock()
        self._parts[phase] += now - self._since
        self._turn_to(OTHER, now)

    def _turn_to(self, phase: int, now: float) -> None:
        if not self._has_begun:  # what came before was the program's start
            self._has_begun, self._begin, self._parts = True, now, [0.0] * len(PHASES)
        self._since = now
        self._marks.append((int(now * 1e9), phase))
        self._file.set_phase(phase, now)

    def _take_batch(self) -> None:
        """The batch, if there is one, was for training."""
        if not self._batch_s:
            return
        self._has_batch = self._has_loader = True
        self._parts[DATA] += self._batch_s
        self._samples += self._batch_samples
        self._batch_s = self._batch_samples = 0.0

    def _end_step(self) -> None:
        """The step has ended with its last update."""
        number = self._num_steps = self._num_steps + 1
        if number == 1:
            self.on_first_step(self)
        end, parts = self._updated_at, self._parts
        if end >= self._looked + _LOOK_S:
            self._look(end)
        if number == 1 and (step := own_step()):  # later it could not be told: a loop may commit more seldom
            self._ahead = step - 1
        if self._operations.is_due(number, end):
            self._read_operations()
        resident, shared, cpu_s, preemptions, device = self._process
        has_loss = self._loss is not None
        record = (
            number + (self._ahead or 0), 1.0, self._begin, end, *parts, self._samples * self.sample_share,
            self._loss or 0.0, float(has_loss), end - self._begin, resident, shared, cpu_s, preemptions, device,
            self.rank, self._operations.generation,
        )  # fmt: skip
        self._file.set_steps_done(number)
        self._learn_place(number)
        if self._ahead is not None:
            self._file.set_reached(number + self._ahead)
        if self._loss is not None:
            self._file.note_loss(int(record[0]), self._loss)
        self._pending = StepRecord(*record) if self._pending is None else merge(self._pending, StepRecord(*record))
        if self._pending.num_steps >= self._file.step_stride:
            self._file.add_step(array("d", self._pending))
            self._pending = None
        self._parts = [0.0] * len(PHASES)
        self._begin, self._samples = end, 0.0
        self._loss, self._is_own_loss = None, False
        self._has_update = self._has_batch = False
        self._stepped.clear()
        self._split = None

    def _learn_place(self, number: int) -> None:
        """After a loss the ranks go on behind the last commit, some of them under another number."""
        generation = own_generation()
        if generation == self._operations.generation:
            return
        self._operations.generation = generation
        self.rank = self.rank_now()
        if self._ahead is not None:
            self._ahead = own_step() - number

    def _end_step_before(self, split: _Split) -> None:
        """It has ended with an earlier update; what came since is of the next one."""
        parts = [now - then for now, then in zip(self._parts, split.parts, strict=True)]
        loss = None if self._loss is None else self._loss - (split.loss or 0.0)
        self._parts, self._samples, self._loss = split.parts, split.samples, split.loss
        self._updated_at = split.updated_at
        self._end_step()
        self._parts, self._loss = parts, loss
        self._has_loader = False

    def _look(self, now: float) -> None:
        """At the process: its memory, its time on processors, how often it was thrown off one."""
        self._looked = now
        usage = resource.getrusage(resource.RUSAGE_SELF)
        try:
            with open("/proc/self/statm", "rb") as file:
                fields = file.read().split()
            resident, shared = float(fields[1]) * _PAGE, float(fields[2]) * _PAGE
        except (OSError, IndexError):  # no Linux: the peak is all that is known
            resident, shared = float(usage.ru_maxrss), 0.0
        self._file.set_peak(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
        cpu_s = usage.ru_utime + usage.ru_stime
        self._process = (resident, shared, cpu_s, float(usage.ru_nivcsw), float(self.device_memory()))
        self._cost_s += self._clock() - now if now > self._since else 0.0

    def _read_operations(self) -> None:
        began = self._clock()
        self._operations.read(list(self._marks), self._num_steps, began)
        self._cost_s += self._clock() - began
        self._file.set_cost(self._cost_s, self._operations.num_seen)
