"""Write chunks and values in letters and numbers: a0+a1 is chunk a, the contributions of ranks 0 and 1 combined."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx._comm.schedules.symbolic import Value

# Up to so many contributions are written out, so that five ranks fit 80 columns; more become Σa (all
# ranks) or a[0-3,6].
_WRITTEN_OUT = 4


def chunk_name(chunk: int) -> str:
    """Return the name of a chunk: a, b, … z, aa, ab, …"""
    name = ""
    chunk += 1
    while chunk:
        chunk, letter = divmod(chunk - 1, 26)
        name = chr(ord("a") + letter) + name
    return name


def chunks_name(start: int, stop: int) -> str:
    """Return the chunks [start, stop): a, or a-d."""
    return chunk_name(start) if stop - start == 1 else f"{chunk_name(start)}-{chunk_name(stop - 1)}"


def value_text(value: Value | None, chunk: int, world_size: int) -> str:
    """Return a rank's value of `chunk`: a0+a1, a[0-5], Σa for all of more than four ranks, · for nothing."""
    if value is None:
        return "·"
    name, ranks = chunk_name(chunk), sorted(value.contributors)
    if len(ranks) <= _WRITTEN_OUT:
        return "+".join(f"{name}{rank}" for rank in ranks)
    if len(ranks) == world_size:
        return f"Σ{name}"
    return f"{name}[{','.join(_runs(ranks))}]"


def _runs(ranks: Iterable[int]) -> list[str]:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
