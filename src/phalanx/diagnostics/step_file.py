"""What a rank writes down of its steps, in a file of fixed size that is mapped: whole at any moment, whatever ends it.

    words 0-63       what the file is, how far the rank is, in which phase, since when
    facts            JSON: who the rank is, what runs there, the names of its groups
    steps      x 2   1,024 records of `stride` steps each; when they are full, pairs of them are merged into the other
    operations x 2   4,096 operations, likewise: every second window of them is kept

A record is a few stores into the page cache: no system call, no thread, and nothing is lost when the process is killed.
One writer. A table is written first and counted then; a full one is thinned into its twin before that takes its place.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

OTHER, DATA, FORWARD, BACKWARD, UPDATE = range(5)
PHASES = ("other", "data", "forward", "backward", "update")

_MAGIC = 0x3153_5045_5453_4C50  # "PLSTEPS1", little endian
_WORDS = 64
_FACTS_AT, _FACTS_BYTES = _WORDS * 8, 8192
_TABLES_AT = 16384
_STEP_FIELDS, _NUM_STEPS = 20, 1024
_OPERATION_FIELDS, _NUM_OPERATIONS = 9, 4096
_STEPS_BYTES, _OPERATIONS_BYTES = 8 * _STEP_FIELDS * _NUM_STEPS, 8 * _OPERATION_FIELDS * _NUM_OPERATIONS
FILE_BYTES = _TABLES_AT + 2 * (_STEPS_BYTES + _OPERATIONS_BYTES)
WINDOW = 32  # operations that are kept or left out together, so that all ranks keep the same

# Words of the header, all doubles but the first.
(_MAGIC_AT, _STEPS_DONE, _PHASE, _PHASE_SINCE, _ENDED, _NUM_WORKERS, _PEAK_BYTES, _STEP_TABLE, _STEP_COUNT,
 _STEP_STRIDE, _OPERATION_TABLE, _OPERATION_COUNT, _OPERATION_STRIDE, _FACTS_LENGTH, _BEGUN, _UNIX_OFFSET,
 _OPERATIONS_SEEN, _COST, _REACHED, _FIRST_BROKEN, _LAST_FINITE) = range(21)  # fmt: skip


class StepRecord(NamedTuple):
    """So many steps; `first` is the number of the first.

    It is the run's where that is known. Seconds of CLOCK_MONOTONIC; parts are sums over the steps.
    """

    first: float
    num_steps: float
    begin: float
    end: float
    other: float
    data: float
    forward: float
    backward: float
    update: float
    samples: float
    loss: float  # sum over the steps that have one
    num_losses: float
    longest: float  # step
    resident_bytes: float
    shared_bytes: float  # of these
    cpu_s: float  # of the process so far
    preemptions: float  # so far
    device_bytes: float
    rank: float  # it may get another one when others are lost
    generation: float


class OperationRecord(NamedTuple):
    """A collective as this rank saw it: times are nanoseconds of CLOCK_MONOTONIC."""

    group: float
    kind: float
    seq: float
    num_bytes: float
    enter_ns: float
    leave_ns: float
    phase: float
    step: float
    status: float


@dataclass(frozen=True)
class RankFile:
    """What the file of a rank says."""

    facts: Mapping[str, Any]
    steps_done: int
    phase: str
    phase_since: float
    ended: bool
    num_workers: int | None
    peak_bytes: int
    begun: float
    unix_offset: float
    operations_seen: int
    cost_s: float
    steps: tuple[StepRecord, ...]
    operation_stride: int
    operations: tuple[OperationRecord, ...]
    reached: int | None = None
    """The last step's number in the run, which others may have begun; None where nobody has told."""
    first_broken: int | None = None
    """The first step whose loss was no finite number."""
    last_finite: int = 0
    """The last step whose loss was one."""


def _allocate(fd: int) -> None:
    """Give the file its size in blocks of the disk: a store into a page of which there is none is a SIGBUS."""
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
    """The writer. Makes the file at `path`; every method but `set_facts` is a few stores.

    Raises:
        OSError: the file can't be made.
    """

    def __init__(self, path: str | os.PathLike[str], begun: float, unix_offset: float) -> None:
        with open(path, "wb+") as file:
            try:
                _allocate(file.fileno())
            except OSError:
                os.unlink(path)
                raise
            self._memory = mmap.mmap(file.fileno(), FILE_BYTES)
        whole = memoryview(self._memory)
        self._words = whole[: _WORDS * 8].cast("d")
        self._tables = whole[_TABLES_AT:].cast("d")
        self._steps = 0  # where the table in use begins, in words
        self._operations = 2 * _STEPS_BYTES // 8
        self._num_steps = self._num_operations = 0
        self.step_stride = self.operation_stride = 1
        self._words[_STEP_STRIDE] = self._words[_OPERATION_STRIDE] = 1
        self._words[_BEGUN], self._words[_UNIX_OFFSET], self._words[_NUM_WORKERS] = begun, unix_offset, -1
        self.set_facts({})
        struct.pack_into("<Q", self._memory, 0, _MAGIC)

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        """Who this is; of what does not fit lists lose their ends, the longest first, then facts are left out whole."""
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

    def set_phase(self, phase: int, since: float) -> None:
        """What the rank does from now on."""
        words = self._words
        words[_PHASE] = phase
        words[_PHASE_SINCE] = since

    def set_num_workers(self, number: int) -> None:
        """How many workers the DataLoader has."""
        self._words[_NUM_WORKERS] = number

    def set_peak(self, num_bytes: int) -> None:
        """The most memory that the process has had."""
        self._words[_PEAK_BYTES] = num_bytes

    def set_ended(self) -> None:
        """The rank has come to its end in order."""
        self._words[_ENDED] = 1

    def set_cost(self, seconds: float, operations_seen: int) -> None:
        """What recording has taken, where it was measured, and how many operations there were in all."""
        self._words[_COST] = seconds
        self._words[_OPERATIONS_SEEN] = operations_seen

    def set_steps_done(self, number: int) -> None:
        """How many steps are done, of which the last may not be in a record yet."""
        self._words[_STEPS_DONE] = number

    def set_reached(self, step: int) -> None:
        """The number that the last step has in the run."""
        self._words[_REACHED] = step

    def note_loss(self, step: int, loss: float) -> None:
        """That of the step with this number: a merged record no longer says in which it ceased to be a number."""
        if math.isfinite(loss):
            self._words[_LAST_FINITE] = step
        elif not self._words[_FIRST_BROKEN]:
            self._words[_FIRST_BROKEN] = step

    def add_step(self, record: array[float]) -> None:
        """One more record, of `step_stride` steps, in the order of `StepRecord`."""
        if self._num_steps == _NUM_STEPS:
            self._thin_steps()
        at = self._steps + self._num_steps * _STEP_FIELDS
        self._tables[at : at + _STEP_FIELDS] = record
        self._num_steps += 1
        self._words[_STEP_COUNT] = self._num_steps

    def add_operation(self, record: array[float], seq: int) -> None:
        """One more operation, if its window is one that is kept."""
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

    def close(self) -> None:
        """Let go of the memory; the file stays."""
        self._words.release()
        self._tables.release()
        self._memory.close()

    def _thin_steps(self) -> None:
        twin = _STEPS_BYTES // 8 - self._steps
        records = _records(self._tables, self._steps, _NUM_STEPS, _STEP_FIELDS)
        for i in range(_NUM_STEPS // 2):
            merged = merge(StepRecord(*records[2 * i]), StepRecord(*records[2 * i + 1]))
            self._tables[twin + i * _STEP_FIELDS : twin + (i + 1) * _STEP_FIELDS] = array("d", merged)
        self.step_stride *= 2
        self._steps, self._num_steps = twin, _NUM_STEPS // 2
        self._turn(_STEP_TABLE, _STEP_COUNT, _STEP_STRIDE, self._num_steps, self.step_stride)

    def _thin_operations(self) -> None:
        first = 2 * _STEPS_BYTES // 8
        twin = first if self._operations != first else first + _OPERATIONS_BYTES // 8
        records = _records(self._tables, self._operations, _NUM_OPERATIONS, _OPERATION_FIELDS)
        self.operation_stride *= 2
        kept = [r for r in records if (int(r[2]) // WINDOW) % self.operation_stride == 0]
        kept = kept if len(kept) < _NUM_OPERATIONS else kept[_NUM_OPERATIONS // 2 :]
        flat = array("d", [value for record in kept for value in record])
        self._tables[twin : twin + len(flat)] = flat
        self._operations, self._num_operations = twin, len(kept)
        self._turn(_OPERATION_TABLE, _OPERATION_COUNT, _OPERATION_STRIDE, len(kept), self.operation_stride)

    def _turn(self, table: int, count: int, stride: int, num: int, step: int) -> None:
        """The other table takes over: a reader in between sees few records of it, never those of the wrong one."""
        words = self._words
        words[count] = 0
        words[table] = 1 - words[table]
        words[stride] = step
        words[count] = num


def merge(a: StepRecord, b: StepRecord) -> StepRecord:
    """Two records, one after the other, as one."""
    sums = {
        name: getattr(a, name) + getattr(b, name)
        for name in ("num_steps", "other", "data", "forward", "backward", "update", "samples", "loss", "num_losses")
    }
    return b._replace(
        first=a.first,
        begin=a.begin,
        longest=max(a.longest, b.longest),
        resident_bytes=max(a.resident_bytes, b.resident_bytes),
        shared_bytes=max(a.shared_bytes, b.shared_bytes),
        device_bytes=max(a.device_bytes, b.device_bytes),
        **sums,
    )


def read_rank_file(data: bytes) -> RankFile | None:
    """What a file with these bytes says; None if it is none. Its writer may be alive, or have died at any store."""
    if len(data) != FILE_BYTES or struct.unpack_from("<Q", data)[0] != _MAGIC:
        return None
    words = memoryview(data)[: _WORDS * 8].cast("d")
    tables = memoryview(data)[_TABLES_AT:].cast("d")
    try:
        facts = json.loads(data[_FACTS_AT : _FACTS_AT + int(words[_FACTS_LENGTH])] or b"{}")
    except ValueError:
        facts = {}
    steps_at = int(words[_STEP_TABLE]) * (_STEPS_BYTES // 8)
    operations_at = (2 * _STEPS_BYTES + int(words[_OPERATION_TABLE]) * _OPERATIONS_BYTES) // 8
    steps = _records(tables, steps_at, min(int(words[_STEP_COUNT]), _NUM_STEPS), _STEP_FIELDS)
    operations = _records(tables, operations_at, min(int(words[_OPERATION_COUNT]), _NUM_OPERATIONS), _OPERATION_FIELDS)
    num_workers = int(words[_NUM_WORKERS])
    phase = int(words[_PHASE])
    return RankFile(
        facts=facts if isinstance(facts, dict) else {},
        steps_done=int(words[_STEPS_DONE]),
        phase=PHASES[phase] if 0 <= phase < len(PHASES) else PHASES[OTHER],
        phase_since=words[_PHASE_SINCE],
        ended=bool(words[_ENDED]),
        num_workers=num_workers if num_workers >= 0 else None,
        peak_bytes=int(words[_PEAK_BYTES]),
        begun=words[_BEGUN],
        unix_offset=words[_UNIX_OFFSET],
        operations_seen=int(words[_OPERATIONS_SEEN]),
        cost_s=words[_COST],
        steps=tuple(StepRecord(*record) for record in steps if record[1] > 0),
        operation_stride=int(words[_OPERATION_STRIDE]),
        operations=tuple(OperationRecord(*record) for record in operations if record[4] > 0),
        reached=int(words[_REACHED]) or None,
        first_broken=int(words[_FIRST_BROKEN]) or None,
        last_finite=int(words[_LAST_FINITE]),
    )


def read_folder(folder: str | os.PathLike[str]) -> list[RankFile]:
    """Those of the files in `folder` that ranks have written, in the order of their names."""
    found = []
    for path in sorted(Path(folder).glob("*.steps")):
        try:
            read = read_rank_file(path.read_bytes())
        except OSError:
            continue
        if read is not None:
            found.append(read)
    return found


def _records(tables: Any, at: int, count: int, num_fields: int) -> Sequence[Sequence[float]]:
    flat = tables[at : at + count * num_fields].tolist()
    return [flat[i : i + num_fields] for i in range(0, len(flat), num_fields)]
