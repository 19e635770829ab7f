"""Run a schedule with symbols instead of numbers, to prove it correct and to draw it.

Every value is represented by the ranks that contributed to it, and by the tree in which they were combined. This
suffices to prove a schedule for given numbers of ranks and chunks: no undefined value is read, no contribution is
counted twice, every rank ends with the operation's result, and all copies of a chunk are bitwise identical, because
they were combined in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from phalanx._comm.schedules.schedule import Schedule, SchedulePhase, Step, Transfer


class Value(NamedTuple):
    """A `Value` is what a chunk holds on one rank; equal values are bitwise identical."""

    contributors: frozenset[int]
    tree: int
    """The number of the combination tree; trees that differ only by a + b = b + a have the same number."""


State = tuple[tuple[Value | None, ...], ...]
"""The value of each chunk on each rank, `state[rank][chunk]`; None if it is undefined."""


@dataclass(frozen=True)
class Snapshot:
    """A `Snapshot` is the state after a step, and the step's transfers; `step` is None for the initial state."""

    step: Step | None
    transfers: tuple[Transfer, ...]
    state: State


class _Trees:
    """`_Trees` numbers combination trees: ranks 0..P-1 are the leaves, and each unordered pair of trees is numbered."""

    def __init__(self, world_size: int) -> None:
        self._next = world_size
        self._number: dict[tuple[int, int], int] = {}

    def combine(self, x: Value, y: Value) -> Value:
        pair = (min(x.tree, y.tree), max(x.tree, y.tree))
        if pair not in self._number:
            self._number[pair] = self._next
            self._next += 1
        return Value(x.contributors | y.contributors, self._number[pair])


def trace(schedule: Schedule) -> Iterator[Snapshot]:
    """Run `schedule`, and yield the state before it and after each step.

    Raises:
        ValueError: a step breaks a rule; the message names the step, the transfer and the rule.
    """
    state = [[_start(schedule, rank, chunk) for chunk in range(schedule.num_chunks)] for rank in _ranks(schedule)]
    trees = _Trees(schedule.world_size)
    yield Snapshot(None, (), _frozen(state))
    for step in schedule.steps():
        transfers = tuple(step.phase.transfers(step.within))
        try:
            _refuse_impossible(schedule, step.phase, transfers)
            _apply(step, state, trees, transfers)
        except ValueError as error:
            place = f"{schedule.algorithm} {schedule.operation} for {schedule.world_size} ranks"
            raise ValueError(f"{place}, step {step.number} ({step.phase.name}): {error}") from None
        yield Snapshot(step, transfers, _frozen(state))


def check(schedule: Schedule) -> None:
    """Prove that `schedule` computes its operation for its P ranks and C chunks; the cost is P·C per step.

    Raises:
        ValueError: the schedule is wrong; the message says where and how.
    """
    for snapshot in trace(schedule):
        state = snapshot.state
    place = f"{schedule.algorithm} {schedule.operation} for {schedule.world_size} ranks"
    for chunk in range(schedule.num_chunks):
        expected = _expected(schedule, chunk)
        values = set()
        for rank in _ranks(schedule):
            if not _is_in_result(schedule, rank, chunk):
                continue
            value = state[rank][chunk]
            found = sorted(value.contributors) if value else []
            if found != sorted(expected):
                raise ValueError(
                    f"{place}: rank {rank} ends with chunk {chunk} from ranks {found}, not {sorted(expected)}"
                )
            values.add(value)
        if len(values) > 1:
            raise ValueError(f"{place}: chunk {chunk} was combined in {len(values)} different orders, so bits differ")
    for phase in schedule.phases:
        _check_alike(place, phase)


def _start(schedule: Schedule, rank: int, chunk: int) -> Value | None:
    match schedule.operation:
        case "all_gather":
            is_input = rank == chunk
        case "broadcast":
            is_input = rank == schedule.root
        case _:
            is_input = True
    return Value(frozenset({rank}), rank) if is_input else None


def _expected(schedule: Schedule, chunk: int) -> set[int]:
    match schedule.operation:
        case "all_gather":
            return {chunk}
        case "broadcast":
            return {schedule.root}
        case _:
            return set(_ranks(schedule))


def _is_in_result(schedule: Schedule, rank: int, chunk: int) -> bool:
    match schedule.operation:
        case "reduce_scatter":
            return rank == chunk
        case "reduce":
            return rank == schedule.root
        case _:
            return True


def _refuse_impossible(schedule: Schedule, phase: SchedulePhase, transfers: tuple[Transfer, ...]) -> None:
    """Raise ValueError if a transfer of a step breaks a rule that does not depend on the ranks' values."""
    for t in transfers:
        if not (0 <= t.src < schedule.world_size and 0 <= t.dst < schedule.world_size and t.src != t.dst):
            raise ValueError(f"{_words(t)}: source and destination must be two different ranks of the schedule")
        if not 0 <= t.start < t.stop <= schedule.num_chunks:
            raise ValueError(f"{_words(t)}: chunks must be a non-empty part of 0..{schedule.num_chunks - 1}")
    for (src, dst), times in Counter((t.src, t.dst) for t in transfers).items():
        if times > phase.per_link:
            raise ValueError(
                f"{times} transfers go from rank {src} to rank {dst}, but the phase declares {phase.per_link}"
            )


def _apply(step: Step, state: list[list[Value | None]], trees: _Trees, transfers: tuple[Transfer, ...]) -> None:
    before = [list(row) for row in state]
    arrivals = sorted(transfers)
    received: list[Transfer] = []
    sent = {(t.src, chunk) for t in transfers for chunk in range(t.start, t.stop)}
    written: dict[tuple[int, int], Transfer] = {}
    for rank in range(len(state)):
        below: dict[int, Value] = {}  # with `by_rank`: the data from lower ranks, by chunk; `rank`'s own comes next
        for t in step.phase.recvs(step.within, rank):
            received.append(t)
            for chunk in range(t.start, t.stop):
                value, mine = before[t.src][chunk], state[rank][chunk]
                if value is None:
                    raise ValueError(f"{_words(t)}: rank {t.src} does not hold chunk {chunk}")
                earlier = written.setdefault((rank, chunk), t)
                if earlier is not t and "copy" in (earlier.kind, t.kind):
                    raise ValueError(f"{_words(t)}: {_words(earlier)} writes chunk {chunk} in the same step")
                if t.kind == "reduce":
                    if mine is None:
                        raise ValueError(f"{_words(t)}: rank {rank} has no chunk {chunk} to combine with")
                    counted = mine.contributors | (below[chunk].contributors if chunk in below else frozenset())
                    if twice := sorted(counted & value.contributors):
                        raise ValueError(f"{_words(t)}: chunk {chunk} would count ranks {twice} twice")
                    if step.phase.by_rank and t.src < rank:
                        below[chunk] = trees.combine(below[chunk], value) if chunk in below else value
                        continue
                    value = trees.combine(trees.combine(below.pop(chunk), mine) if chunk in below else mine, value)
                elif (rank, chunk) in sent:
                    raise ValueError(f"{_words(t)}: chunk {chunk} is overwritten while rank {rank} sends it")
                state[rank][chunk] = value
        for chunk, value in below.items():
            mine = state[rank][chunk]
            assert mine is not None  # otherwise refused above
            state[rank][chunk] = trees.combine(value, mine)
    if sorted(received) != arrivals:
        wrong = next(iter(set(received) ^ set(arrivals)))
        raise ValueError(f"{_words(wrong)}: the source and the destination disagree on this transfer")


def _check_alike(place: str, phase: SchedulePhase) -> None:
    if not phase.alike:
        return
    shapes = [sorted((t.src, t.dst, t.width, t.kind) for t in phase.transfers(step)) for step in range(phase.num_steps)]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{place}: phase {phase.name!r} declares that its steps are alike, but they differ")


def _words(t: Transfer) -> str:
    chunks = f"chunk {t.start}" if t.width == 1 else f"chunks {t.start}..{t.stop - 1}"
    return f"{t.kind} of {chunks} from rank {t.src} to rank {t.dst}"


def _ranks(schedule: Schedule) -> range:
    return range(schedule.world_size)


def _frozen(state: list[list[Value | None]]) -> State:
    return tuple(tuple(row) for row in state)
