"""One trial, drawn from its number alone: how many ranks, what they do in turn, who fails, how, and where in it."""

from __future__ import annotations

import random
from dataclasses import dataclass

DEATHS = ("SIGKILL", "SIGSEGV", "os._exit", "sys.exit", "exception")
MISMATCHES = ("operation", "dtype", "size", "root")
FAULTS = DEATHS + MISMATCHES

ROOTED = ("broadcast", "reduce", "gather", "scatter")
OPERATIONS = (
    *ROOTED,
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "asynchronous",
    "messages",
    "backward",
)
COUNTS = (1, 17, 1000, 40_000, 300_000)  # elements: within one stage, around it, several
_STEPS = 24
_MOST_DELAY_S = 0.004  # several steps


@dataclass(frozen=True)
class Step:
    """An operation that all `ranks` call. `root` is one of them; `count` is in elements."""

    operation: str
    ranks: tuple[int, ...]
    count: int
    root: int


@dataclass(frozen=True)
class Trial:
    """The steps are repeated until something is raised. The fault strikes `victim` at step `at`, or, if it is one that
    can come from outside, `delay_s` later, wherever the rank is by then."""

    number: int
    world_size: int
    fault: str
    victim: int
    at: int
    delay_s: float
    part: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def is_mismatch(self) -> bool:
        """Whether the victim calls something else, rather than ends."""
        return self.fault in MISMATCHES

    @property
    def witnesses(self) -> tuple[int, ...]:
        """The ranks that must be told."""
        if not self.is_mismatch:
            return tuple(r for r in range(self.world_size) if r != self.victim)
        step = self.steps[self.at]
        if step.operation == "messages":  # only the receiver of a message sees that it does not fit
            return (step.ranks[(step.ranks.index(self.victim) + 1) % len(step.ranks)],)
        return step.ranks


def plan_trial(number: int, seed: int) -> Trial:
    """The trial with this number: the faults in turn, everything else at random."""
    draw = random.Random(seed * 1_000_003 + number)
    fault = FAULTS[number % len(FAULTS)]
    world_size = draw.randint(2, 4)
    everybody = tuple(range(world_size))
    part = tuple(sorted(draw.sample(everybody, draw.randint(2, max(2, world_size - 1)))))
    steps = [_draw_step(draw, OPERATIONS, (everybody, everybody, part)) for _ in range(_STEPS)]
    at = draw.randrange(_STEPS)
    if fault in MISMATCHES:
        steps[at] = _draw_step(draw, _mismatched(fault), (everybody, everybody, part))
    victim = draw.choice(steps[at].ranks)
    return Trial(number, world_size, fault, victim, at, draw.uniform(0, _MOST_DELAY_S), part, tuple(steps))


def _mismatched(fault: str) -> tuple[str, ...]:
    """The operations in which a rank can differ from the others in this way."""
    if fault == "root":
        return ROOTED
    if fault == "operation":  # a message that is not sent is a hang, not a mismatch
        return tuple(o for o in OPERATIONS if o != "messages")
    return tuple(o for o in OPERATIONS if o not in ("barrier", "backward"))


def _draw_step(draw: random.Random, operations: tuple[str, ...], groups: tuple[tuple[int, ...], ...]) -> Step:
    operation = draw.choice(operations)
    ranks = groups[0] if operation == "backward" else draw.choice(groups)
    return Step(operation, ranks, draw.choice(COUNTS), draw.choice(ranks))
