"""A schedule is a collective as data: in each step, which rank sends which chunks to which, to be combined or copied.

    Schedule ── SchedulePhase ("scatter-reduce") ── step 0, 1, … ── Transfer (src → dst, chunks [start, stop), kind)

The buffer of every rank is cut into the same chunks (`chunk_bounds`). Within a step, every transfer reads the value
that its source had *before* the step; received data take effect after the step. The same object is executed (`play`),
proved (`symbolic`), drawn (by `phalanx explain`) and costed (`cost`), so `phalanx explain` shows what actually runs.

Transfers are not stored: a phase computes them on demand, because a ring of 65,536 ranks has 8.6 billion of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Kind = Literal["reduce", "copy"]
Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


class Transfer(NamedTuple):
    """`src` sends its chunks [start, stop) to `dst`, which combines them with its own, or overwrites its own by them.

    A `Transfer` is a tuple rather than a dataclass, because a simulation of many ranks creates millions of them.
    """

    src: int
    dst: int
    start: int
    stop: int
    kind: Kind

    @property
    def width(self) -> int:
        """Return the number of chunks sent."""
        return self.stop - self.start


@dataclass(frozen=True)
class SchedulePhase:
    """A `SchedulePhase` is a sequence of steps that follow one rule.

    `sends(step, rank)` returns the transfers from `rank` in `step`, counted from 0 within the phase; this function
    alone defines the rule. `sources(step, rank)` lists the ranks that send to `rank`, in the order in which `rank`
    combines their data; `senders(step)` lists all ranks that send in `step`, and perhaps some that do not.
    """

    name: str
    num_steps: int
    sends: Callable[[int, int], Sequence[Transfer]]
    sources: Callable[[int, int], Sequence[int]]
    senders: Callable[[int], Sequence[int]]
    alike: bool = False
    """Whether each step has the same sources, destinations, widths and kinds, and only the chunks differ."""
    by_rank: bool = False
    """Whether the receiver combines in rank order, including its own part; otherwise its own part comes first."""
    per_link: int = 1
    """The maximum number of transfers from one rank to another in a step; they arrive in the order of `sends`."""

    def transfers(self, step: int) -> Iterator[Transfer]:
        """Yield all transfers in `step`, of all ranks."""
        for rank in self.senders(step):
            yield from self.sends(step, rank)

    def recvs(self, step: int, rank: int) -> tuple[Transfer, ...]:
        """Return the transfers to `rank` in `step`, in the order in which they are combined."""
        return tuple(t for src in self.sources(step, rank) for t in self.sends(step, src) if t.dst == rank)


class Step(NamedTuple):
    """A `Step` is one step of a whole schedule, or of one rank's part; `number` counts from 0 over all phases."""

    number: int
    phase: SchedulePhase
    within: int
    """The step's number within the phase, from 0."""


@dataclass(frozen=True)
class Schedule:
    """A `Schedule` is a collective for `world_size` ranks over `num_chunks` chunks.

    The result of each operation, with chunks numbered as in the buffer:
        all_reduce      every rank ends with the reduction of every chunk.
        reduce_scatter  rank r ends with the reduction of chunk r (one chunk per rank); its other chunks are scratch.
        all_gather      rank r starts with chunk r only; every rank ends with every chunk.
        broadcast       `root` starts with every chunk; every rank ends with every chunk.
        reduce          `root` ends with the reduction of every chunk; the other ranks' buffers are scratch.

    `order` describes in words how the contributions to one chunk are combined. All ranks that end with a chunk's final
    value get it from the same combination (up to a + b = b + a, which is exact in floating point), so it is bitwise
    identical on all of them.
    """

    algorithm: str
    operation: Operation
    world_size: int
    num_chunks: int
    phases: tuple[SchedulePhase, ...]
    order: str
    root: int = 0

    def __post_init__(self) -> None:
        require_world_size(self.world_size)
        if not 0 <= self.root < self.world_size:
            raise ValueError(f"root must be a rank in 0..{self.world_size - 1}, got {self.root}")

    @property
    def num_steps(self) -> int:
        """Return the number of steps of all phases together."""
        return sum(phase.num_steps for phase in self.phases)

    @property
    def contributions(self) -> int:
        """Return the number of ranks that contribute to a final value."""
        return 1 if self.operation in ("all_gather", "broadcast") else self.world_size

    def steps(self) -> Iterator[Step]:
        """Yield every step in order; `step.phase.transfers(step.within)` are its transfers."""
        number = 0
        for phase in self.phases:
            for within in range(phase.num_steps):
                yield Step(number, phase, within)
                number += 1

    def for_rank(self, rank: int) -> Iterator[RankStep]:
        """Yield the steps in which `rank` sends or receives; only its own and its sources' transfers are computed."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, got {rank}")
        for number, phase, within in self.steps():
            sends, recvs = tuple(phase.sends(within, rank)), phase.recvs(within, rank)
            if sends or recvs:
                yield RankStep(number, phase.name, sends, recvs, phase.by_rank)


class RankStep(NamedTuple):
    """A `RankStep` is one rank's transfers in one step; it combines `recvs` in order (see `SchedulePhase.by_rank`)."""

    number: int
    phase: str
    sends: tuple[Transfer, ...]
    recvs: tuple[Transfer, ...]
    by_rank: bool = False


def chunk_bounds(length: int, num_chunks: int) -> list[int]:
    """Return the bounds of the chunks of a buffer of `length` elements: chunk c is [bounds[c], bounds[c + 1]).

    Sizes differ by at most one, and the longer chunks come first; if there are fewer elements than chunks, some chunks
    are empty.
    """
    size, longer = divmod(length, num_chunks)
    return [chunk * size + min(chunk, longer) for chunk in range(num_chunks + 1)]


def require_world_size(world_size: int) -> None:
    """Raise ValueError unless there is at least one rank."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
