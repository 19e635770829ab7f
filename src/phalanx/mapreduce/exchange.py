"""Shuffle: each rank has a stream of bytes for each rank; all_to_all exchanges them in rounds of bounded size.

rank 0   │ for 0 │ for 1          │ for 2 │         round 0: the first chunk of each stream
rank 1   │ for 0   │ for 1 │ for 2   │              round 1: the next …
                                                    as many rounds as the longest stream has chunks
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.mapreduce.map_reduce_job import TaskError
from phalanx.mapreduce.spool import Spool, SpoolExtent, SpoolStream
from phalanx.mapreduce.team import Team

_LEAST_CHUNK = 4096
_MOST_CHUNK = 8 << 20


def plan_rounds(longest: int, world_size: int, memory_bytes: int) -> tuple[int, int]:
    """Return the number of rounds, and a stream's bytes per round, which all take about an eighth of the memory."""
    chunk = min(max(memory_bytes // (16 * world_size), _LEAST_CHUNK), _MOST_CHUNK)
    return -(-longest // chunk), chunk


def exchange(
    team: Team, outgoing: Sequence[SpoolStream], incoming: Sequence[int], longest: int, inbox: Spool, memory_bytes: int
) -> list[SpoolStream]:
    """Send a stream to each rank, and receive all ranks' streams into `inbox`. All ranks call it.

    `incoming` has the length of the stream from each rank; `longest` is the length of the longest stream between any
    two ranks. A rank's stream to itself is returned without a copy.

    Raises:
        TaskError: a rank could not write to its disk, or read from it. Every rank raises it.
    """
    rounds, chunk = plan_rounds(longest, team.size, memory_bytes)
    arrived: list[list[SpoolExtent]] = [[] for _ in incoming]
    problem: str | None = None
    for number in range(rounds):
        start = number * chunk
        expected = [
            0 if peer == team.rank else max(0, min(chunk, length - start)) for peer, length in enumerate(incoming)
        ]
        sizes = [0 if peer == team.rank else stream.length_of(start, chunk) for peer, stream in enumerate(outgoing)]
        try:
            parts: list[bytes] = [stream.read(start, size) for stream, size in zip(outgoing, sizes, strict=True)]
        except OSError as error:  # the others wait for this rank's bytes: send zeros, which nobody will use
            problem, parts = problem or str(error), [bytes(size) for size in sizes]
        received = team.all_to_all(parts, expected)
        try:
            for extents, data in zip(arrived, received, strict=True):
                if len(data) and problem is None:
                    extents.append(inbox.append(data))
        except OSError as error:
            problem = str(error)
    if rounds:
        _raise_problem(team.gather(problem))
    return [
        outgoing[peer] if peer == team.rank else SpoolStream(inbox, extents) for peer, extents in enumerate(arrived)
    ]


def _raise_problem(problems: Sequence[str | None]) -> None:
    named = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None)
    if named:
        raise TaskError(
            f"map_reduce: data of the shuffle could not be written to disk, or read from it:\n{named}\n"
            "Is the disk full? Pass a spill_folder with more room, or more memory_bytes."
        )
