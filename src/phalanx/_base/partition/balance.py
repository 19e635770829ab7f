"""Divide a list of costs into parts so that the most expensive part is as cheap as possible. This is pure arithmetic.

A pipeline of p parts needs sum + (m - 1) max for m micro-batches, and the sum is fixed, so the maximum decides. Among
divisions with the same maximum, the one with the most equal parts (least sum of squares) is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balance(costs: Sequence[float] | Sequence[Sequence[float]], parts: int) -> list[int]:
    """Return how many layers each of `parts` parts gets: at least one, in order, with the lowest maximal cost.

    Arguments:
        costs: one cost per layer; or one such list per part, if a layer's cost depends on the part.

    Cost: parts * layers² additions. The result is optimal, not a heuristic.

    Raises:
        ValueError: there are fewer layers than parts.
    """
    if parts < 1:
        raise ValueError(f"a model is cut into at least one part, got {parts}")
    by_part = _by_part(costs, parts)
    count = len(by_part[0])
    if count < parts:
        raise ValueError(
            f"{count} layer{'s' * (count != 1)} cannot be cut into {parts} parts of at least one layer each"
        )
    # best[k]: of the first k layers in so many parts, (maximal cost, sum of squares, begin of the last part)
    none = (float("inf"), float("inf"), 0)
    best: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] + [none] * count
    tables = []
    for part in range(parts):
        total = [0.0, *accumulate(by_part[part])]
        table = [none] * (count + 1)
        for end in range(part + 1, count - (parts - part - 1) + 1):
            for begin in range(part, end):
                cost = total[end] - total[begin]
                dearest, squares, _ = best[begin]
                table[end] = min(table[end], (max(dearest, cost), squares + cost * cost, begin))
        tables.append(table)
        best = table
    counts, end = [], count
    for table in reversed(tables):
        begin = table[end][2]
        counts.append(end - begin)
        end = begin
    return counts[::-1]


def _by_part(costs: Sequence[float] | Sequence[Sequence[float]], parts: int) -> list[list[float]]:
    rows = [list(row) for row in costs if isinstance(row, Sequence)]
    if rows:
        if len(rows) != parts or len({len(row) for row in rows}) != 1:
            raise ValueError(f"costs have {len(rows)} lists for {parts} parts, or lists of different lengths")
        return rows
    return [[float(cost) for cost in costs if not isinstance(cost, Sequence)]] * parts
