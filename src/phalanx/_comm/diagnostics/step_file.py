"""Keep a rank's steps in a mapped file of fixed size, which is valid at any moment, however the rank ends.

    words 0-63       the file's format, and measurements of the process
    facts            JSON: the rank, its program, the names of its groups
    steps      x 2   1,024 records of `stride` steps each; a full table is merged in pairs into the other one
    operations x 2   4,096 operations; every second window of a full table is kept
    state      x 2   JSON: the rank's state when it last turned events into records
    events           the newest 1,024, in order: those since the last state are not in the records yet

An event costs a few stores to the page cache, without a system call or a thread. Nothing is lost if the process is
killed, because `read_rank_file` turns the last events into records. There is one writer, which writes a record first,
then the count. Tables and states are double-buffered: a full table is thinned into its twin, and a new state is written
to the twin of the current one, which it then replaces.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx._comm.diagnostics.step_machine import OTHER, PHASES, FinishedStep, StepMachine
from phalanx._comm.diagnostics.step_records import OperationRecord, StepRecord, StepTally, clamp_times, merge

_MAGIC = 0x3453_5045_5453_4C50  # "PLSTEPS4", little endian
_WORDS = 64
_FACTS_AT, _FACTS_BYTES = _WORDS * 8, 8192
_TABLES_AT = 16384
_STEP_FIELDS, _NUM_STEPS = 21, 1024
_OPERATION_FIELDS, _NUM_OPERATIONS = 9, 4096
_STEPS_BYTES, _OPERATIONS_BYTES = 8 * _STEP_FIELDS * _NUM_STEPS, 8 * _OPERATION_FIELDS * _NUM_OPERATIONS
_STATES_AT, _STATE_BYTES = _TABLES_AT + 2 * (_STEPS_BYTES + _OPERATIONS_BYTES), 8192
_EVENTS_AT, NUM_EVENTS = _STATES_AT + 2 * _STATE_BYTES, 1024
_EVENT_FIELDS, _EVENTS_BEGIN = 3, 64  # the word that counts them, and padding for its cache line
FILE_BYTES = -(-(_EVENTS_AT + _EVENTS_BEGIN + 8 * _EVENT_FIELDS * NUM_EVENTS) // 4096) * 4096
WINDOW = 32  # operations kept or dropped together, so that all ranks keep the same operations

# The header: each name is one word of eight bytes, all doubles except the first.
(_MAGIC_AT, _ENDED, _PEAK_BYTES, _STEP_TABLE, _STEP_COUNT, _STEP_STRIDE, _OPERATION_TABLE, _OPERATION_COUNT,
 _OPERATION_STRIDE, _FACTS_LENGTH, _BEGUN, _UNIX_OFFSET, _STATE, _FIRST_STATE_LENGTH,
 _SECOND_STATE_LENGTH) = range(15)  # fmt: skip
_STATE_LENGTHS = (_FIRST_STATE_LENGTH, _SECOND_STATE_LENGTH)


def _allocate(fd: int) -> None:
    """Allocate the file's blocks on the disk: on a full disk, a store to a page without a block raises SIGBUS."""
    os.ftruncate(fd, 0)
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, FILE_BYTES)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    for at in range(0, FILE_BYTES, 1 << 16):
        os.pwrite(fd, bytes(min(1 << 16, FILE_BYTES - at)), at)


class StepFile:
    """A `StepFile` creates and writes the file at `path`. Most calls cost only a few stores.

    If a signal handler raises in the middle of a method, `repair` makes the file valid again.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str], begun: float, unix_offset: float) -> None:
        from phalanx import _core  # imported here, because readers do not need it

        self._unmap = _core.unmap
        with open(path, "wb+") as file:
            try:
                _allocate(file.fileno())
            except OSError:
                os.unlink(path)
                raise
            self._memory = mmap.mmap(file.fileno(), FILE_BYTES)
            self._mapped = _core.map(file.fileno(), FILE_BYTES)  # a second mapping, since the core needs an address
        whole = memoryview(self._memory)
        self._words = whole[: _WORDS * 8].cast("d")
        self._tables = whole[_TABLES_AT:_STATES_AT].cast("d")
        self._num_events = whole[_EVENTS_AT : _EVENTS_AT + 8].cast("Q")
        self._events = whole[_EVENTS_AT + _EVENTS_BEGIN :].cast("d")
        self._steps = 0  # the offset of the current table, in words
        self._operations = 2 * _STEPS_BYTES // 8
        self._num_steps = self._num_operations = 0
        self.step_stride = self.operation_stride = 1
        self._words[_STEP_STRIDE] = self._words[_OPERATION_STRIDE] = 1
        self._words[_BEGUN], self._words[_UNIX_OFFSET] = begun, unix_offset
        self.set_facts({})
        struct.pack_into("<Q", self._memory, 0, _MAGIC)

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        """Write the facts of this rank; if they do not fit, first halve the longest lists, then leave out facts."""
        left = dict(facts)
        while len(data := json.dumps(left).encode()) > _FACTS_BYTES:
            lists = [name for name, value in left.items() if isinstance(value, list) and value]
            if lists:
                longest = max(lists, key=lambda name: len(json.dumps(left[name])))
                left[longest] = left[longest][: len(left[longest]) // 2]
            else:
                left.popitem()
        self._words[_FACTS_LENGTH] = 0
        self._memory[_FACTS_AT : _FACTS_AT + len(data)] = data
        self._words[_FACTS_LENGTH] = len(data)

    def set_peak(self, num_bytes: int) -> None:
        """Write the peak memory of the process."""
        self._words[_PEAK_BYTES] = num_bytes

    def set_ended(self) -> None:
        """Record that the rank has ended normally."""
        self._words[_ENDED] = 1

    def set_state(self, state: str) -> None:
        """Write the state with which a reader can process the events after these records, as JSON.

        If the state does not fit, the previous state stays, and the reader processes the events after that state.
        """
        data = state.encode()
        if len(data) > _STATE_BYTES:
            return
        twin = 1 - int(self._words[_STATE])
        at = _STATES_AT + twin * _STATE_BYTES
        self._memory[at : at + len(data)] = data
        self._words[_STATE_LENGTHS[twin]] = len(data)
        self._words[_STATE] = twin

    def events_since(self, number: int) -> tuple[list[float], int]:
        """Return the fields of all remaining events after the first `number`, and the total number of events."""
        num = self._num_events[0]
        return read_events(self._events, number, num), num

    def add_step(self, record: array[float]) -> None:
        """Add one more record, of `step_stride` steps, with the fields of `StepRecord`."""
        if self._num_steps == _NUM_STEPS:
            self._thin_steps()
        at = self._steps + self._num_steps * _STEP_FIELDS
        self._tables[at : at + _STEP_FIELDS] = record
        self._num_steps += 1
        self._words[_STEP_COUNT] = self._num_steps

    def repair(self) -> int:
        """Complete a switch of tables that an exception has interrupted; return the number of steps in the records."""
        self._turn_steps()
        self._turn_operations()
        records = _records(self._tables, self._steps, self._num_steps, _STEP_FIELDS)
        return int(sum(record[1] for record in records))

    def add_operation(self, record: array[float], seq: int) -> None:
        """Add one more operation, if its window is kept."""
        if (seq // WINDOW) % self.operation_stride:
            return
        if self._num_operations == _NUM_OPERATIONS:
            self._thin_operations()
            if (seq // WINDOW) % self.operation_stride:
                return
        at = self._operations + self._num_operations * _OPERATION_FIELDS
        self._tables[at : at + _OPERATION_FIELDS] = record
        self._num_operations += 1
        self._words[_OPERATION_COUNT] = self._num_operations

    @property
    def events_address(self) -> int:
        """Return the address of a word that counts the events; the ring of events begins 64 bytes after it."""
        return self._mapped + _EVENTS_AT

    def close(self) -> None:
        """Release the memory; the file stays."""
        for view in (self._words, self._tables, self._num_events, self._events):
            view.release()
        self._memory.close()
        self._unmap(self._mapped, FILE_BYTES)

    def _thin_steps(self) -> None:
        twin = _STEPS_BYTES // 8 - self._steps
        records = _records(self._tables, self._steps, _NUM_STEPS, _STEP_FIELDS)
        for i in range(_NUM_STEPS // 2):
            merged = merge(StepRecord(*records[2 * i]), StepRecord(*records[2 * i + 1]))
            self._tables[twin + i * _STEP_FIELDS : twin + (i + 1) * _STEP_FIELDS] = array("d", merged)
        self.step_stride, self._steps, self._num_steps = self.step_stride * 2, twin, _NUM_STEPS // 2
        self._turn_steps()

    def _thin_operations(self) -> None:
        first = 2 * _STEPS_BYTES // 8
        twin = first if self._operations != first else first + _OPERATIONS_BYTES // 8
        records = _records(self._tables, self._operations, _NUM_OPERATIONS, _OPERATION_FIELDS)
        stride = self.operation_stride * 2
        kept = [r for r in records if (int(r[2]) // WINDOW) % stride == 0]
        kept = kept if len(kept) < _NUM_OPERATIONS else kept[_NUM_OPERATIONS // 2 :]
        flat = array("d", [value for record in kept for value in record])
        self._tables[twin : twin + len(flat)] = flat
        self.operation_stride, self._operations, self._num_operations = stride, twin, len(kept)
        self._turn_operations()

    def _turn_steps(self) -> None:
        """Switch to the other table; a reader at that moment sees no records, rather than a mixture of both tables."""
        words = self._words
        words[_STEP_COUNT] = 0
        words[_STEP_TABLE] = self._steps * 8 // _STEPS_BYTES
        words[_STEP_STRIDE] = self.step_stride
        words[_STEP_COUNT] = self._num_steps

    def _turn_operations(self) -> None:
        words = self._words
        words[_OPERATION_COUNT] = 0
        words[_OPERATION_TABLE] = (self._operations * 8 - 2 * _STEPS_BYTES) // _OPERATIONS_BYTES
        words[_OPERATION_STRIDE] = self.operation_stride
        words[_OPERATION_COUNT] = self._num_operations


@dataclass(frozen=True)
class RankFile:
    """A `RankFile` is the content of a rank's file."""

    facts: Mapping[str, Any]
    steps_done: int
    phase: str
    phase_since: float
    ended: bool
    num_workers: int | None
    peak_bytes: int
    begun: float
    unix_offset: float
    steps: tuple[StepRecord, ...]
    operations: tuple[OperationRecord, ...]
    reached: int | None = None
    """The run's number of this rank's last step; None if unknown."""
    first_broken: int | None = None
    """The first step whose loss was not finite."""
    last_finite: int = 0
    """The last step whose loss was finite."""


def read_rank_file(data: bytes) -> RankFile | None:
    """Parse the bytes of a file; return None if it is not a rank's file. The rank may have died at any point."""
    if len(data) != FILE_BYTES or struct.unpack_from("<Q", data)[0] != _MAGIC:
        return None
    try:
        return _parse(data)
    except (ValueError, OverflowError, IndexError, KeyError, TypeError, AttributeError):  # the file was overwritten
        return None


def read_folder(folder: str | os.PathLike[str]) -> list[RankFile]:
    """Return the rank files in `folder`, in the order of their names."""
    found = []
    for path in sorted(Path(folder).glob("*.steps")):
        try:
            read = read_rank_file(path.read_bytes())
        except OSError:
            continue
        if read is not None:
            found.append(read)
    return found


def read_state(data: bytes) -> Mapping[str, Any]:
    """Return the latest state in the bytes of a file."""
    words = _read_words(data)
    twin = int(words[_STATE])
    return _read_json(data, _STATES_AT + twin * _STATE_BYTES, words[_STATE_LENGTHS[twin]])


def _read_words(data: bytes) -> Sequence[float]:
    return memoryview(data)[: _WORDS * 8].cast("d").tolist()


def _parse(data: bytes) -> RankFile:
    """Return the file's content, with the steps that the rank had not yet turned into records."""
    whole = memoryview(data)
    words = _read_words(data)
    facts = _read_json(data, _FACTS_AT, words[_FACTS_LENGTH])
    tables = whole[_TABLES_AT:_STATES_AT].cast("d")
    steps_at = int(words[_STEP_TABLE]) * (_STEPS_BYTES // 8)
    operations_at = (2 * _STEPS_BYTES + int(words[_OPERATION_TABLE]) * _OPERATIONS_BYTES) // 8
    rows = _records(tables, steps_at, min(int(words[_STEP_COUNT]), _NUM_STEPS), _STEP_FIELDS)
    steps = tuple(StepRecord(*row) for row in rows if row[1] > 0)
    rows = _records(tables, operations_at, min(int(words[_OPERATION_COUNT]), _NUM_OPERATIONS), _OPERATION_FIELDS)
    operations = tuple(OperationRecord(*row) for row in rows if row[4] > 0)

    state = read_state(data)
    tally = StepTally(**state.get("tally", {"rank": facts.get("rank", 0)}))
    pending = state.get("pending")
    late = [] if pending is None else [StepRecord(*pending)]

    def on_step(step: FinishedStep) -> None:
        late.append(tally.add(step))

    machine = StepMachine.resume(state.get("machine", {"since": words[_BEGUN]}), on_step)
    num_events = struct.unpack_from("=Q", data, _EVENTS_AT)[0]
    flat = read_events(whole[_EVENTS_AT + _EVENTS_BEGIN :].cast("d"), int(state.get("taken", 0)), num_events)
    for at in range(0, len(flat), 3):
        machine.feed(*flat[at : at + 3])
    # If the rank died after it wrote records and before it wrote its state, the latest steps are in both.
    twice = sum(record.num_steps for record in steps) - state.get("in_records", 0)
    while late and twice > 0:
        twice -= late.pop(0).num_steps
    return RankFile(
        facts=facts,
        steps_done=tally.num_steps,
        phase=PHASES[machine.phase] if 0 <= machine.phase < len(PHASES) else PHASES[OTHER],
        phase_since=machine.since,
        ended=bool(words[_ENDED]),
        num_workers=machine.num_workers if machine.num_workers >= 0 else None,
        peak_bytes=int(words[_PEAK_BYTES]),
        begun=words[_BEGUN],
        unix_offset=words[_UNIX_OFFSET],
        steps=clamp_times(steps + tuple(late)),
        operations=operations,
        reached=tally.reached,
        first_broken=tally.first_broken or None,
        last_finite=tally.last_finite,
    )


def read_events(events: Any, since: int, num: int) -> list[float]:
    """Return the fields of events `since` to `num` that are still in the ring `events`, a view of doubles."""
    first = max(since, num - NUM_EVENTS)
    if first >= num:
        return []
    begin, end, last = (at * _EVENT_FIELDS for at in (first % NUM_EVENTS, num % NUM_EVENTS, NUM_EVENTS))
    flat: list[float] = events[begin:end].tolist() if begin < end else [*events[begin:last], *events[:end]]
    return flat


def _read_json(data: bytes, at: int, length: float) -> Mapping[str, Any]:
    try:
        found = json.loads(data[at : at + int(length)] or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _records(tables: Any, at: int, count: int, num_fields: int) -> Sequence[Sequence[float]]:
    flat = tables[at : at + count * num_fields].tolist()
    return [flat[i : i + num_fields] for i in range(0, len(flat), num_fields)]
