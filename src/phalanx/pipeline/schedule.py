"""A `PipelineSchedule` orders the stages' work on micro-batches, to be run, drawn or simulated.

p ranks, v stages on each, m micro-batches; stage k is on rank k mod p. F forward, B backward; zero_bubble splits each
backward: I computes the gradient of the input, for which the previous stage waits, and W the gradient of the weights.

    gpipe          F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3           all forward, then all backward
    1f1b           F0 F1  .  . B0 F2 B1 F3 B2  . B3              at most p - stage micro-batches are in flight
    interleaved    as 1f1b, with v stages on each rank: bubbles are 1/v as long, with v times as many messages
    zero_bubble    as 1f1b, with W where 1f1b has a bubble

Source: Huang et al. (2019), GPipe; Narayanan et al. (2019), PipeDream; Narayanan et al. (2021), Megatron-LM; Qi et al.
(2023), Zero Bubble Pipeline Parallelism. `tests/pipeline/test_schedule.py` compares the orders with those of
torch.distributed.pipelining, whose schedules run only its own stages.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """An `Action` is a stage's work on one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """A `PipelineSchedule` orders the work of every rank: `orders[rank]` is the sequence of the rank's actions."""

    name: str
    num_stages: int
    micro_batches: int
    orders: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.orders)

    def rank_of(self, stage: int) -> int:
        """Return the rank on which a stage runs."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> range:
        """Return the stages of a rank, first to last."""
        return range(rank, self.num_stages, self.num_ranks)

    def in_flight(self, stage: int) -> int:
        """Return the maximum number of micro-batches that a stage has between forward and the end of backward."""
        return self._in_flight[stage]

    @property
    def most_tensors(self) -> int:
        """Return an estimate of the most tensors of one size on a rank: those in flight, and intermediate results."""
        return 8 * max(self.in_flight(stage) for stage in range(self.num_stages)) + 16

    @functools.cached_property
    def _in_flight(self) -> tuple[int, ...]:
        return tuple(self._most_in_flight(stage) for stage in range(self.num_stages))

    @functools.cached_property
    def backwards_before(self) -> dict[tuple[int, int], int]:
        """Return, by stage and micro-batch, how many backwards of the stage begin before the micro-batch's forward."""
        found, begun = {}, [0] * self.num_stages
        for order in self.orders:
            for kind, stage, micro_batch in order:
                if kind == "F":
                    found[stage, micro_batch] = begun[stage]
                elif kind != "W":
                    begun[stage] += 1
        return found

    @functools.cached_property
    def last_backward(self) -> dict[int, int]:
        """Return, by stage, the micro-batch with the last backward; empty if the schedule splits backwards."""
        return {stage: micro_batch for order in self.orders for kind, stage, micro_batch in order if kind == "B"}

    def _most_in_flight(self, stage: int) -> int:
        count = most = 0
        for action in self.orders[self.rank_of(stage)]:
            if action.stage == stage:
                count += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
                most = max(most, count)
        return most


def plan_schedule(
    name: str, num_ranks: int, micro_batches: int, num_stages: int | None = None, *, training: bool = True
) -> PipelineSchedule:
    """Return the schedule `name`. `num_stages` defaults to one per rank, or two per rank for interleaved.

    Without `training`, the schedule has only forwards.

    Raises:
        ValueError: the schedule is unknown, or does not exist for these numbers.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, got {name!r}")
    if num_ranks < 1 or micro_batches < 1:
        raise ValueError(f"a pipeline needs at least one rank and one micro-batch, got {num_ranks} and {micro_batches}")
    if num_stages is None:
        num_stages = 2 * num_ranks if name == "interleaved" else num_ranks
    if name == "interleaved":
        if num_stages % num_ranks or num_stages < num_ranks:
            raise ValueError(
                f"schedule 'interleaved' needs the same number of stages on every rank: {num_stages} stages cannot be "
                f"spread over {num_ranks} ranks. Take a multiple of {num_ranks}."
            )
    elif num_stages != num_ranks:
        raise ValueError(
            f"schedule {name!r} has one stage on each rank: {num_stages} stages cannot be spread over {num_ranks} "
            "ranks. Take as many stages as ranks, or schedule 'interleaved'."
        )
    return _plan(name, num_ranks, micro_batches, num_stages, training)


@functools.lru_cache(maxsize=64)
def _plan(name: str, num_ranks: int, micro_batches: int, num_stages: int, training: bool) -> PipelineSchedule:
    orders = tuple(
        tuple(_order(name, rank, num_ranks, num_stages, micro_batches) if training
              else _forwards(rank, num_ranks, num_stages // num_ranks, micro_batches))
        for rank in range(num_ranks)
    )  # fmt: skip
    return PipelineSchedule(name, num_stages, micro_batches, orders)


def _order(name: str, rank: int, p: int, num_stages: int, m: int) -> list[Action]:
    v = num_stages // p
    forwards, backwards = _forwards(rank, p, v, m), _backwards(rank, p, v, m)
    if name == "gpipe":
        return forwards + backwards
    if name == "zero_bubble":
        return _zero_bubble(rank, p, m)
    # The last rank begins its first backward when its first micro-batch has passed all its stages. Each earlier rank
    # runs as many forwards more as fit until the gradient of its first micro-batch arrives.
    ahead = p - 1 - rank if v == 1 else (v - 1) * len(_rounds(p, m)[0]) + 2 * (p - 1 - rank)
    return _one_forward_one_backward(forwards, backwards, min(ahead, len(forwards)))


def _one_forward_one_backward(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


def _forwards(rank: int, p: int, v: int, m: int) -> list[Action]:
    """Return the forwards of a rank.

    Micro-batches run in rounds of p: each round passes all stages of the rank before the next round begins.
    """
    if v == 1:
        return [Action("F", rank, i) for i in range(m)]
    return [Action("F", k * p + rank, i) for round_ in _rounds(p, m) for k in range(v) for i in round_]


def _backwards(rank: int, p: int, v: int, m: int) -> list[Action]:
    if v == 1:
        return [Action("B", rank, i) for i in range(m)]
    return [Action("B", k * p + rank, i) for round_ in _rounds(p, m) for k in reversed(range(v)) for i in round_]


def _rounds(p: int, m: int) -> list[range]:
    """Divide m >= p micro-batches into rounds of p; spread the remainder, so that no round is shorter than p."""
    count = max(1, m // p)
    size, more = divmod(m, count)
    begins = [i * size + min(i, more) for i in range(count + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(begins)]


def _zero_bubble(rank: int, p: int, m: int) -> list[Action]:
    """Return the order of ZB-H1: no stage has more than p micro-batches in flight.

    Rank r defers W of r micro-batches to the end.
    """
    ahead, order, weights = min(p - 1 - rank, m), [], 0
    order += [Action("F", rank, i) for i in range(ahead)]
    for i in range(m):
        if ahead + i < m:
            order.append(Action("F", rank, ahead + i))
        order.append(Action("I", rank, i))
        if i >= rank:
            order.append(Action("W", rank, weights))
            weights += 1
    return order + [Action("W", rank, i) for i in range(weights, m)]
