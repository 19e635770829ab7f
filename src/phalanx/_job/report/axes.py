"""Choose the ticks of an axis, and their labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_NUM_MARKS = 5
_MOST = 1e300  # the largest drawable value: differences and marks beyond it overflow


@dataclass(frozen=True)
class Axis:
    """An axis is a scale from `low` to `high`, with marks; it is logarithmic if `is_log`."""

    low: float
    high: float
    marks: tuple[float, ...]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return the position of a value, from 0 to 1."""
        if self.is_log:
            low, high = math.log(self.low), math.log(self.high)
            return (math.log(max(value, self.low)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)


def linear(values: Sequence[float], *, from_zero: bool = False) -> Axis:
    """Return an axis that ends at round numbers around `values`."""
    finite = [min(max(value, -_MOST), _MOST) for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if from_zero or (0 <= low < 0.3 * high):
        low = min(low, 0.0)
    if high - low < 1e-9 * max(abs(high), 1e-30):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if high else (0.0, 1.0)
    step = nice_step((high - low) / _NUM_MARKS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    marks = tuple(step * i for i in range(first, last + 1))
    return Axis(marks[0], marks[-1], marks)


def logarithmic(values: Sequence[float], base: float = 10.0, *, most: int = 7) -> Axis:
    """Return an axis with powers of `base` around `values`, which are all above zero."""
    above = [min(max(value, 1 / _MOST), _MOST) for value in values if value > 0] or [1.0, base]
    first, last = math.floor(math.log(min(above), base) + 1e-9), math.ceil(math.log(max(above), base) - 1e-9)
    if last <= first + 1 and max(above) < 1.5 * min(above):  # put a single value in the middle
        first -= 1
    last = max(last, first + 1)
    every = math.ceil((last - first + 1) / most)
    return Axis(base**first, base**last, tuple(base**i for i in range(first, last + 1, every)), is_log=True)


def nice_step(rough: float) -> float:
    """Return the smallest number that is 1, 2 or 5 times a power of ten, and at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def plain(marks: Sequence[float]) -> Callable[[float], str]:
    """Return a function that formats each of `marks` with as many digits as needed to distinguish them all."""
    step = min((b - a for a, b in pairwise(marks)), default=1.0)
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    most = max((abs(mark) for mark in marks), default=0.0)
    if most >= 1e6 or digits > 5:
        significant = max(3, math.ceil(math.log10(most / step) + 1e-9) + 1)
        return lambda value: f"{value:.{significant}g}"
    if most >= 1e4 and digits == 0 and all(mark % 1000 == 0 for mark in marks):
        return lambda value: f"{value / 1000:,.0f}k" if value else "0"
    return lambda value: f"{value:,.{digits}f}"
