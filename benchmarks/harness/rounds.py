"""Rounds: every contestant is measured once per round, so that a slow minute of the machine falls on all of them.

round 0   A B C
round 1   B C A      the order turns, so that nobody always runs behind the same neighbour
round 2   C A B
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Summary:
    """What several rounds of one quantity say: the median is the result, the extremes are the noise."""

    median: float
    low: float
    high: float
    rounds: int


def summarise(samples: Iterable[float]) -> Summary:
    """Summarise one contestant's samples, one per round.

    Raises:
        ValueError: there is no sample.
    """
    values = list(samples)
    if not values:
        raise ValueError("summarise: no samples, so there is no median. Run at least one round.")
    return Summary(statistics.median(values), min(values), max(values), len(values))


def plan_rounds(contestants: Sequence[T], rounds: int) -> Iterator[list[T]]:
    """Yield the order of each round: everyone once, starting one place later each time."""
    for turn in range(rounds):
        start = turn % len(contestants) if contestants else 0
        yield [*contestants[start:], *contestants[:start]]


def interleave(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each contestant once per round and return its values in the order of the rounds.

    A contestant measures itself and returns the number that is compared (seconds, bytes per second, ...).
    What it raises is not caught: a benchmark that lost a contestant has no ratio to report.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for order in plan_rounds(list(contestants), rounds):
        for name in order:
            samples[name].append(contestants[name]())
    return samples
