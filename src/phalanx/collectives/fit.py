"""Fit latency and bandwidth to measured times, and say how well the model then predicts them.

The predicted time is linear in α and β as long as the same transfers stay the longest ones: t = base + α·m + β·n. The
coefficients come from the schedules themselves, priced with unit links; α and β are those that minimise the squared
*relative* errors, because sizes span decades and a large time must not drown the small ones. Neither is ever negative.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.collectives.closed_form import predict
from phalanx.collectives.network import Link, Links, Topology
from phalanx.collectives.schedule import Operation

# A time below every one of interest, so that a link of this latency or cost per byte counts as free.
_FREE = Link(latency_s=0.0, bytes_per_s=math.inf)


@dataclass(frozen=True)
class Measurement:
    """A measurement is one measured run: what was done, and the seconds it took (a median, say)."""

    algorithm: str
    operation: Operation
    topology: Topology
    nbytes: int
    seconds: float

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise ValueError(f"a measured time must be more than zero seconds, got {self.seconds}")


@dataclass(frozen=True)
class Fit:
    """A fit has the fitted links, and each measurement's predicted seconds and relative error (0.1: 10% too slow)."""

    links: Links
    predicted: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        """Return the median of the absolute relative errors."""
        return statistics.median(abs(error) for error in self.errors)

    @property
    def worst_error(self) -> float:
        """Return the largest absolute relative error."""
        return max(abs(error) for error in self.errors)


def fit(measurements: Sequence[Measurement], links: Links, which: Literal["intra", "inter"] = "inter") -> Fit:
    """Fit latency and bandwidth of one link of `links`; the other link and the reduce throughput are taken as given.

    Raises:
        ValueError: fewer than two measurements, or measurements that cannot tell latency from bandwidth (all of one
            size and number of ranks), or that do not use that link at all.
    """
    if len(measurements) < 2:
        raise ValueError(f"fitting latency and bandwidth takes at least 2 measurements, got {len(measurements)}")
    rows = []
    for m in measurements:
        base = _predict(m, _with(links, which, _FREE))
        per_alpha = _predict(m, _unit(which, Link(latency_s=1.0, bytes_per_s=math.inf)))
        per_beta = _predict(m, _unit(which, Link(latency_s=0.0, bytes_per_s=1.0)))
        rows.append((per_alpha / m.seconds, per_beta / m.seconds, (m.seconds - base) / m.seconds))
    alpha, beta = _least_squares(rows, which)
    fitted = _with(links, which, Link(alpha, 1 / beta if beta > 0 else math.inf))
    predicted = tuple(_predict(m, fitted) for m in measurements)
    errors = tuple((p - m.seconds) / m.seconds for p, m in zip(predicted, measurements, strict=True))
    return Fit(fitted, predicted, errors)


def _least_squares(rows: list[tuple[float, float, float]], which: str) -> tuple[float, float]:
    """Return the α, β ≥ 0 that minimise Σ (a·α + b·β - y)², by the normal equations."""
    aa = sum(a * a for a, _, _ in rows)
    ab = sum(a * b for a, b, _ in rows)
    bb = sum(b * b for _, b, _ in rows)
    ay = sum(a * y for a, _, y in rows)
    by = sum(b * y for _, b, y in rows)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        raise ValueError(
            f"these measurements cannot tell the latency of the {which} link from its bandwidth: "
            "measure at least two sizes, with ranks that use the link"
        )
    alpha, beta = (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
    if alpha < 0:
        alpha, beta = 0.0, max(0.0, by / bb)
    elif beta < 0:
        alpha, beta = max(0.0, ay / aa), 0.0
    return alpha, beta


def _predict(m: Measurement, links: Links) -> float:
    return predict(m.algorithm, m.operation, m.nbytes, m.topology, links).seconds


def _with(links: Links, which: Literal["intra", "inter"], link: Link) -> Links:
    return replace(links, intra=link) if which == "intra" else replace(links, inter=link)


def _unit(which: Literal["intra", "inter"], link: Link) -> Links:
    """Return links of which only `which` costs time, so that what remains is the coefficient."""
    return _with(Links(_FREE, _FREE, math.inf), which, link)
