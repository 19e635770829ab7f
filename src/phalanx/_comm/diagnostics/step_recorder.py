"""Record a rank's steps in its file: events are recorded at once, and turned into records many at a time.

    DataLoader, autograd, optimizers ─▶ event log ┄ periodically ┄▶ step machine ─▶ records, operations, state
                                        (stores)                    (what the events mean)

If a signal handler raises anywhere in the second half and the program continues, the interrupted work is repeated from
the previous state, as a reader does after a kill. No event is lost, and none counts twice.

The second half runs every half second, or after as many steps as the flight recorder has room for. A step streams its
parameters through the CPU caches, so a line of Python between steps costs ten times as much as in a loop of its own.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from phalanx._comm.diagnostics import progress_page
from phalanx._comm.diagnostics.interruptions import SuppressedErrors, is_interruption
from phalanx._comm.diagnostics.operation_sampler import OperationSampler
from phalanx._comm.diagnostics.progress_page import own_generation, own_step
from phalanx._comm.diagnostics.step_file import NUM_EVENTS, StepFile
from phalanx._comm.diagnostics.step_machine import (
    BEGIN_BACKWARD,
    BEGIN_DATA,
    BEGIN_UPDATE,
    END_BACKWARD,
    END_BACKWARD_WITH_LOSS,
    END_DATA,
    END_PHASE,
    END_UPDATE,
    NO_LOSS,
    OTHER,
    OWN_LOSS,
    PHASES,
    SAMPLES,
    STEP,
    FinishedStep,
    StepMachine,
)
from phalanx._comm.diagnostics.step_records import StepRecord, StepTally, merge
from phalanx._comm.diagnostics.whereabouts import ObservedGroup, listen_for_ends, stop_listening

_MEASURE_S = 0.5  # between two measurements of the process's memory, and the maximum delay of events
_LOSS_S = 1.0  # between two reads of a loss from an accelerator, which wait for it
_MOST_EVENTS = NUM_EVENTS // 2
_NUM_EAGER = 1000  # after this many events without a step, events are no longer processed one by one
_PAGE = resource.getpagesize()
_BEGIN_OF = {"data": BEGIN_DATA, "backward": BEGIN_BACKWARD, "update": BEGIN_UPDATE}
_END_OF = {"data": END_DATA, "backward": END_BACKWARD, "update": END_UPDATE}


class StepRecorder:
    """A `StepRecorder` records the steps of one process; only the thread that creates it may call it.

    Cost: an event is a few stores; turning events into records takes some 10 µs per step.

    Arguments:
        path: the file to create.
        facts: known facts of the rank; more may be added later.
        clock: replaces CLOCK_MONOTONIC.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: str, facts: Mapping[str, Any], clock: Callable[[], float] | None = None) -> None:
        from phalanx import _core

        self._given_clock = clock
        self._clock = clock or time.monotonic
        self._thread = threading.get_ident()
        now = self._clock()
        self._file = StepFile(path, now, time.time() - now)
        self._facts = dict(facts)
        self._file.set_facts(self._facts)
        self._operations = OperationSampler(self._file, lambda groups: self.add_facts(groups=groups))
        self._machine = StepMachine(now, self._add_step)
        self._tally = StepTally(int(self._facts.get("rank", 0)))
        self.log = _core.EventLog(
            self._file.events_address, NUM_EVENTS, float(BEGIN_UPDATE), float(END_UPDATE), self._process_events_safely
        )
        """The event log; its `mark(kind, value)` writes an event, of the kinds in `step_machine`."""
        self.device_memory: Callable[[], float] = float
        self.rank_now: Callable[[], int] = lambda: self.rank
        """A function that returns this rank's number. It is called when the ranks have formed their group again,
        because the number may have changed.
        """
        self.on_first_step: Callable[[StepRecorder], None] = lambda recorder: None
        self._num_processed = 0
        self._events_per_step = 6.0
        self._pending: StepRecord | None = None
        self._in_records = 0  # the number of steps in records
        self._in_records_already = 0  # how many of the next steps, which are processed again, are already in records
        self._is_whole = True  # nothing was interrupted
        self._is_place_unknown = False  # whether the rank's place in a new generation is unknown
        self._loss_due = 0.0
        self._measured_at = 0.0
        self._saved_state = ""  # as JSON
        self._save_state()
        listen_for_ends(self.end_group)
        progress_page.listen_for_generations(self._prepare_generation)

    # -- events --------------------------------------------------------------------------------------------------------

    def mark(self, kind: float, value: float = 0.0) -> None:
        """Record an event of `step_machine`. Code that must be fast calls `log.mark` directly."""
        if self._given_clock is None:
            self.log.mark(kind, value)
        else:
            self.log.mark(kind, value, self._given_clock())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as one of the `PHASES`, in a loop that times its own phases."""
        if name not in PHASES:
            raise ValueError(f"phase: name must be one of {', '.join(PHASES)}, got {name!r}")
        if name in _BEGIN_OF:
            self.mark(_BEGIN_OF[name])
        else:
            self.mark(END_PHASE, OTHER)
        try:
            yield
        finally:
            if name in _END_OF:
                self.mark(_END_OF[name])
            else:
                self.mark(END_PHASE, PHASES.index(name))

    def step(self, samples: float | None = None, loss: float | None = None) -> None:
        """End a step here, whatever events it had."""
        if samples is not None:
            self.mark(SAMPLES, samples)
        if loss is not None:
            self.note_loss(loss)
        self.mark(STEP)

    def end_backward(self, loss: Any) -> None:
        """Record the end of `backward`; `loss` is the tensor on which it was called, or None if that is not a loss."""
        try:
            value = None if loss is None else self.read_loss(loss)
        except BaseException:  # a signal handler raised it
            self.mark(END_BACKWARD)
            raise
        if value is None:
            self.mark(END_BACKWARD)
        else:
            self.mark(END_BACKWARD_WITH_LOSS, value)

    def read_loss(self, loss: Any) -> float | None:
        """Return the value of a tensor of one element, or None if it is not read.

        An accelerator's tensor is read at most once a second, because the read waits for the device. It is not read
        during the capture of a CUDA graph, which the wait would abort, and in which nothing runs.
        """
        if loss.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing():
            return None
        loss = getattr(loss, "unscaled_loss", loss)  # the loss before a GradScaler's factor
        if not loss.is_cpu:
            now = self._clock()
            if now < self._loss_due:
                return None
            self._loss_due = now + _LOSS_S
        value = None
        with SuppressedErrors():  # a tracer's tensor has no value
            value = loss.item()
        return float(value) if isinstance(value, (float, int)) else None

    def note_loss(self, loss: float | None) -> None:
        """Set the step's loss, in place of the tensor on which `backward` was called; None if it is unknown."""
        if loss is None:
            self.mark(NO_LOSS)
        else:
            self.mark(OWN_LOSS, loss)

    # -- facts ---------------------------------------------------------------------------------------------------------

    def add_facts(self, **facts: Any) -> None:
        """Write more facts of this rank, or of the run."""
        if self._thread == -1:
            return
        self._facts.update(facts)
        self._file.set_facts(self._facts)

    def end_group(self, group: ObservedGroup) -> None:
        """Read the last operations of a group that this process is about to leave."""
        if threading.get_ident() == self._thread:
            self.log.take()
            with SuppressedErrors(self._stop_recording):
                self._operations.read_group(group, list(self._machine.marks), self._tally.num_steps)

    @property
    def facts(self) -> Mapping[str, Any]:
        return self._facts

    @property
    def rank(self) -> int:
        """Return the current rank in the job."""
        return self._tally.rank

    @property
    def sample_share(self) -> float:
        """Return the weight of a sample on this rank, below 1 if ranks with parts of one model see the same samples."""
        return self._tally.sample_share

    @sample_share.setter
    def sample_share(self, share: float) -> None:
        self.log.take()
        self._tally.sample_share = share
        if self._is_whole:
            self._save_state()

    @property
    def num_steps(self) -> int:
        """Return the number of steps done."""
        self.log.take()
        return self._tally.num_steps

    def forget(self) -> None:
        """Stop writing: this process is a fork of the recorded one."""
        self._thread = -1
        self.log.close()

    def close(self, *, ended: bool) -> None:
        """Write all records; with `ended`, record that the process ends normally."""
        if self._thread == -1:
            return
        try:
            self.log.take()
            self.log.close()
            with SuppressedErrors(self._stop_recording):
                self._finish()
        finally:
            self._thread = -1
            self.log.close()
            stop_listening(self.end_group)
            progress_page.stop_listening(self._prepare_generation)
            if ended:
                self._file.set_ended()
            self._file.close()

    def _finish(self) -> None:
        if self._is_whole:  # otherwise a reader processes the events
            self._machine.end()
            if not self._tally.num_steps:  # otherwise its lifetime would be unknown
                self._machine.since = self._clock()
            if self._pending is not None:
                self._write_record(self._pending)
                self._pending = None
            self._measure_process(self._clock())
            self._read_operations()
            self._save_state()
        if not self._tally.num_steps:  # no training, but some activity
            with SuppressedErrors():
                self.on_first_step(self)

    # -- periodic work -------------------------------------------------------------------------------------------------

    def _process_events_safely(self) -> None:
        """Process new events. This runs inside the user's calls, so an error of ours is printed and ends the recording.

        Only Ctrl-C and exceptions from the user's signal handlers are raised; the interrupted work is repeated later.
        """
        try:
            self._process_events()
        except Exception as error:
            if is_interruption(error):
                raise
            self._stop_recording(error)

    def _stop_recording(self, error: Exception) -> None:
        self.log.close()
        with SuppressedErrors():  # there may be no stderr
            why = f"{type(error).__name__}: {error}"
            print(f"phalanx: recording stopped, so the run's report will be incomplete: {why}", file=sys.stderr)

    def _process_events(self) -> None:
        """Turn new events into records."""
        if not self._is_whole:
            self._restore_state()
        self._is_whole = False
        tally, steps = self._tally, self._tally.num_steps
        flat, num = self._file.events_since(self._num_processed)
        for at in range(0, len(flat), 3):
            self._machine.feed(*flat[at : at + 3])
        if tally.num_steps > steps:
            self._events_per_step = (num - self._num_processed) / (tally.num_steps - steps)
            self._read_operations()
        self._num_processed = num
        self._save_state()
        self._is_whole = True
        self.log.took(num, self._limit(), self._clock() + _MEASURE_S)

    def _restore_state(self) -> None:
        """Return to the state before the work that an exception has interrupted. The file keeps its content."""
        state = json.loads(self._saved_state)
        began = int(state["machine"]["since"] * 1e9)
        marks = [mark for mark in self._machine.marks if mark[0] <= began]
        self._machine = StepMachine.resume(state["machine"], self._add_step)
        self._machine.marks.extend(marks)
        self._tally = StepTally(**state["tally"])
        self._pending = None if state["pending"] is None else StepRecord(*state["pending"])
        self._num_processed = state["taken"]
        self._in_records = self._file.repair()
        self._file.set_facts(self._facts)
        self._in_records_already = self._in_records - state["in_records"]
        if self._in_records_already and self._pending is not None:
            self._in_records_already -= int(self._pending.num_steps)
            self._pending = None

    def _limit(self) -> int:
        """Return the number of new events to process at a time; few while this rank's place in the run is unknown."""
        if self._is_place_unknown or not self._tally.num_steps:
            return 1 if self._num_processed < _NUM_EAGER else 6
        return max(1, min(_MOST_EVENTS, int(self._events_per_step * self._operations.steps_between)))

    def _add_step(self, step: FinishedStep) -> None:
        tally = self._tally
        if tally.num_steps == 0:
            with SuppressedErrors():
                self.on_first_step(self)
            tally.generation = self._operations.generation = own_generation()  # the rank may have joined later
            if committed := own_step():  # later the difference is unknown: a loop may commit less often
                tally.ahead = committed - 1
        if step.end >= self._measured_at + _MEASURE_S:
            self._measure_process(step.end)
        record = tally.add(step)
        self._update_place()
        if self._in_records_already:
            self._in_records_already -= 1
            return
        self._pending = record if self._pending is None else merge(self._pending, record)
        if self._pending.num_steps >= self._file.step_stride:
            self._write_record(self._pending)
            self._pending = None

    def _write_record(self, record: StepRecord) -> None:
        self._file.add_step(array("d", record))
        self._in_records += int(record.num_steps)

    def _save_state(self) -> None:
        state = {
            "taken": self._num_processed,
            "in_records": self._in_records,
            "pending": self._pending,
            "tally": asdict(self._tally),
            "machine": self._machine.state(),
        }
        self._saved_state = json.dumps(state)
        self._file.set_state(self._saved_state)

    def _prepare_generation(self) -> None:
        """Write the earlier steps before the ranks continue in another generation."""
        if threading.get_ident() == self._thread:
            self._is_place_unknown = True
            self.log.take()
            self._is_place_unknown = True  # `take` has processed earlier steps, which set it to False
            self.log.took(self._num_processed, 1, 0.0)

    def _update_place(self) -> None:
        """Update the place in the run: after ranks are lost, the others continue from the last commit, renumbered."""
        tally = self._tally
        self._is_place_unknown = False
        generation = own_generation()
        if generation == tally.generation:
            return
        tally.generation = self._operations.generation = generation
        with SuppressedErrors():
            tally.rank = self.rank_now()
        if tally.ahead is not None:
            tally.ahead = own_step() - tally.num_steps

    def _measure_process(self, now: float) -> None:
        """Measure the process's memory, CPU time and preemptions."""
        self._measured_at = now
        usage = resource.getrusage(resource.RUSAGE_SELF)
        try:
            with open("/proc/self/statm", "rb") as file:
                fields = file.read().split()
            resident, shared = float(fields[1]) * _PAGE, float(fields[2]) * _PAGE
        except (OSError, IndexError):  # not Linux: only the peak is known
            resident, shared = float(usage.ru_maxrss), 0.0
        self._file.set_peak(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
        cpu_s, on_device = usage.ru_utime + usage.ru_stime, 0.0
        with SuppressedErrors():
            on_device = float(self.device_memory())
        self._tally.process = (resident, shared, cpu_s, float(usage.ru_nivcsw), on_device)

    def _read_operations(self) -> None:
        self._operations.read(list(self._machine.marks), self._tally.num_steps)
