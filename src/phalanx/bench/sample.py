"""A `Sample` is what one contestant was measured to do in one round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PARTS = {
    "replicate": "make replicas",
    "scatter": "cut and join the batch",
    "threads": "start and end threads",
    "computing": "forward: computing",
    "waiting": "forward: waiting",
    "backward": "backward",
    "update": "optimizer",
}
"""The parts of a step in the order in which they are shown. Their sum is the step, up to what lies between them."""


@dataclass(frozen=True)
class Sample:
    """It has medians over the steps of a round, in seconds.

    The wall time of forward is `computing` (a processor worked for the thread that runs it) plus `waiting` (none did);
    `stops` is how often it gave up its core of its own accord, where the system counts that. `weights` is the sum of
    the magnitudes of all parameters at the end.
    """

    step: float
    parts: Mapping[str, float]
    weights: float
    stops: float | None = None


def median_of(samples: Sequence[Sample]) -> Sample:
    """Return the median of each figure by itself."""
    stops = [sample.stops for sample in samples if sample.stops is not None]
    return Sample(
        step=statistics.median(sample.step for sample in samples),
        parts={
            part: statistics.median(sample.parts.get(part, 0.0) for sample in samples)
            for part in PARTS
            if any(part in sample.parts for sample in samples)
        },
        weights=statistics.median(sample.weights for sample in samples),
        stops=statistics.median(stops) if stops else None,
    )


def slowest_of(samples: Sequence[Sample]) -> Sample:
    """Return the rank that all others wait for."""
    return max(samples, key=lambda sample: sample.step)
