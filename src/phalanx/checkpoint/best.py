"""Choose the best checkpoints of a run by a metric that the caller measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
Mode = Literal["min", "max"]
KeepBest = tuple[str, Mode, int]


@dataclass(frozen=True)
class Best:
    """`Best` selects the `count` checkpoints with the lowest ("min") or highest ("max") value of `metric`."""

    metric: str
    mode: Mode
    count: int

    @classmethod
    def of(cls, keep_best: KeepBest) -> Best:
        """Parse the user's setting, such as ("accuracy", "max", 3).

        Raises:
            ValueError: the setting has another form.
        """
        try:
            metric, mode, count = keep_best
        except (TypeError, ValueError):
            metric, mode, count = "", "min", 0
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        if not (isinstance(metric, str) and metric and mode in ("min", "max") and is_count):
            raise ValueError(
                f"keep_best must be (metric, 'min' or 'max', count), such as ('accuracy', 'max', 3), got {keep_best!r}"
            )
        return cls(metric, mode, count)

    def order(self, items: Sequence[T], value_of: Callable[[T], float | None]) -> list[T]:
        """Return the best of `items`, best first; equal ones keep their order. Leave out items of value None or NaN."""
        found = [(value, item) for item in items if (value := value_of(item)) is not None and not math.isnan(value)]
        found.sort(key=lambda pair: pair[0], reverse=self.mode == "max")  # the sort is stable in both directions
        return [item for _, item in found[: self.count]]

    def select_best(self, entries: Sequence[T], metrics_of: Callable[[T], Mapping[str, float]]) -> list[T]:
        """Return the best of `entries` (sorted latest first), best first; among equals, the oldest comes first."""
        return self.order(entries[::-1], lambda entry: metrics_of(entry).get(self.metric))

    def add(self, values: Sequence[float], value: float) -> tuple[tuple[float, ...], bool]:
        """Return the best of `values` and the new `value`, and whether the new value is among them."""
        numbers = [*values, value]
        chosen = self.order(range(len(numbers)), numbers.__getitem__)
        return tuple(numbers[number] for number in chosen), len(values) in chosen


def choose_outdated(
    entries: Sequence[T], keep: int | None, best: Best | None, metrics_of: Callable[[T], Mapping[str, float]]
) -> list[T]:
    """Return the entries that are neither among the newest `keep` nor the best; `entries` is sorted latest first."""
    if keep is None:
        return []
    old = entries[keep:]
    if best is None or not old:
        return list(old)
    kept = best.select_best(entries, metrics_of)
    return [entry for entry in old if entry not in kept]
