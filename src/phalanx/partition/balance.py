"""Where to cut a list of costs so that the dearest part is as cheap as can be. Pure arithmetic.

A pipeline of p parts needs sum + (m - 1) max for m micro-batches, and the sum is given: so the maximum decides. Among
cuts with the same maximum the one whose parts are most alike (least sum of squares) is taken: it leaves most room.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balance(costs: Sequence[float], parts: int, *, memory: Sequence[int] = (), limit: int | None = None) -> list[int]:
    """How many layers each of `parts` parts gets: each at least one, in order, the dearest as cheap as possible.

    Arguments:
        memory: bytes of each layer, where there is a `limit` of bytes per part.

    Cost: parts * layers² additions. The best of all cuts, not a heuristic.

    Raises:
        ValueError: there are fewer layers than parts, or no cut keeps every part within the limit.
    """
    count = len(costs)
    if parts < 1:
        raise ValueError(f"a model is cut into at least one part, got {parts}")
    if count < parts:
        raise ValueError(
            f"{count} layer{'s' * (count != 1)} cannot be cut into {parts} parts of at least one layer each"
        )
    total = [0.0, *accumulate(costs)]
    held = [0, *accumulate(memory)] if memory else [0] * (count + 1)
    # best[k]: of the first k layers in so many parts, (dearest, sum of squares, where the last part begins)
    none = (float("inf"), float("inf"), 0)
    best: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] + [none] * count
    tables = []
    for part in range(parts):
        table = [none] * (count + 1)
        for end in range(part + 1, count - (parts - part - 1) + 1):
            for begin in range(part, end):
                if limit is not None and held[end] - held[begin] > limit:
                    continue
                cost = total[end] - total[begin]
                dearest, squares, _ = best[begin]
                table[end] = min(table[end], (max(dearest, cost), squares + cost * cost, begin))
        tables.append(table)
        best = table
    if best[count][0] == float("inf"):
        raise ValueError(
            f"no cut into {parts} parts keeps each within {limit} bytes: the layers need {held[-1]} in all, "
            f"the largest {max(memory)}"
        )
    counts, end = [], count
    for table in reversed(tables):
        begin = table[end][2]
        counts.append(end - begin)
        end = begin
    return counts[::-1]
