"""Cut a list of costs so that the dearest part is as cheap as can be. This is pure arithmetic.

A pipeline of p parts needs sum + (m - 1) max for m micro-batches, and the sum is given: so the maximum decides. Among
cuts with the same maximum the one whose parts are most alike (least sum of squares) is taken: it leaves most room.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balance(costs: Sequence[float] | Sequence[Sequence[float]], parts: int) -> list[int]:
    """Return how many layers each of `parts` parts gets: at least one, in order, with the dearest as cheap as possible.

    Arguments:
        costs: of each layer; or one such list for each part, where a layer costs more in one part than in another.

    Cost: parts * layers² additions. It is the best of all cuts, not a heuristic.

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
    # best[k]: of the first k layers in so many parts, (dearest, sum of squares, where the last part begins)
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
