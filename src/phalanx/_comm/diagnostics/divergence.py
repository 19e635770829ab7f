"""Describe ranks that are on different lines of the program, or have run out of data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx._comm.diagnostics.flight_recorder import Record
from phalanx._comm.diagnostics.rank_list import name_ranks

DIVERGENCE_ADVICE = (
    "Only some ranks reach a call under `if rank == 0`, or under another condition that not every rank meets.\n"
    "Move the call out of the condition, or give those ranks their own group (dist.new_group)."
)

EVEN_ADVICE = "Give every rank the same number of batches, with phalanx.DistributedSampler or drop_last=True"
"""The advice if ranks run out of data and the others cannot continue without them."""

JOIN_ADVICE = f"{EVEN_ADVICE}; or train inside `with torch.distributed.algorithms.Join([model]):`."
"""The advice if ranks run out of data and the others could continue without them."""


def describe_divergence(operations: Mapping[int, str]) -> str:
    """Return a sentence about ranks on different lines of the program; "" if all ranks are on the same line.

    `operations` has each rank's operation with the same number, 'all_reduce #42 (train.py:88)', or "" if it has called
    none. Ranks in the same operation on the same line do not diverge, even if a size or an option differs.
    """
    places: dict[str, list[int]] = {}
    for rank, operation in operations.items():
        places.setdefault(operation, []).append(rank)
    if len(places) < 2:
        return ""
    # The smallest group comes first, and of equally large ones the lowest ranks: usually rank 0 does extra work.
    (place, who), *others = sorted(places.items(), key=lambda item: (len(item[1]), item[1]))
    if not place:
        (place, who), others = others[0], [(place, who), *others[1:]]
    absent = sorted(rank for _, away in others for rank in away)
    if len(others) == 1:
        instead = f"{'it' if len(absent) == 1 else 'they'} {_are(absent, others[0][0])}"
    else:
        instead = "; ".join(f"{name_ranks(away)} {_are(away, there)}" for there, away in others)
    have = "has" if len(absent) == 1 else "have"
    return (
        f"{name_ranks(who).capitalize()} {_are(who, place)}, which {name_ranks(absent)} {have} not reached: {instead}."
    )


def describe_left_alone(operation: str, here: Sequence[int], gone: Sequence[int], behind: Mapping[int, str]) -> str:
    """Return a sentence about an operation that its missing ranks never join, because their program has finished.

    `here` are the ranks in the operation, `gone` those that have left; `behind` has the positions of the others.
    """
    rest = "".join(f"; rank {rank} {position}" for rank, position in behind.items())
    return f"{name_ranks(here).capitalize()} {_are(here, operation)}, which {name_ranks(gone)} can never reach{rest}."


def describe_earlier_divergence(records: Sequence[Sequence[Record]], before: int) -> str:
    """Return a sentence about the latest operation before #`before` that ranks called from different lines, or "".

    Matching calls from different lines are not a mismatch, but they show that the ranks are out of step; a later
    operation fails.
    """
    by_rank = [{r.seq: r for r in of_rank if r.is_numbered_call and r.seq < before} for of_rank in records]
    for number in sorted(set.intersection(*map(set, by_rank)), reverse=True):
        calls = [of_rank[number] for of_rank in by_rank]
        if len({call.call_site for call in calls}) > 1:
            where = ", ".join(
                f"rank {rank} at {call.call_site}" for rank, call in enumerate(calls[:8]) if call.call_site
            )
            return f"Before that, they called {calls[0].label} from different lines: {where}."
    return ""


def _are(who: Sequence[int], place: str) -> str:
    one = len(who) == 1
    if not place:
        return f"{'has' if one else 'have'} called nothing yet"
    return f"{'is' if one else 'are'} in {place}"
