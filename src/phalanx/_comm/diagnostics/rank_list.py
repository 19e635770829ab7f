"""Format ranks as text: '0-3, 7', 'rank 3', 'ranks 0-3, 7'."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def format_ranks(ranks: Iterable[int], *, separator: str = ",", shortest_run: int = 2) -> str:
    """Return `0-3,7` for 0, 1, 2, 3, 7. Runs shorter than `shortest_run` are written one by one."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) >= shortest_run else map(str, run)
    return separator.join(parts)


def name_ranks(ranks: Collection[int]) -> str:
    """Return 'rank 3', 'ranks 1, 2' or 'ranks 0-3, 7', as sentences name them."""
    return f"rank{'s' * (len(ranks) != 1)} {format_ranks(ranks, separator=', ', shortest_run=4)}"
