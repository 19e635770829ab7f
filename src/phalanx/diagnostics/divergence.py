"""A collective that only some ranks reach, told as such: who stands in it, and where the others are instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.coordination.bootstrap import ranks
from phalanx.diagnostics.flight_recorder import Record

ADVICE = (
    "A call under `if rank == 0`, or another condition that not every rank meets, is one that only some ranks ever "
    "reach.\nTake it out of there, or give those ranks a group of their own (dist.new_group)."
)


def tell_parting(calls: Mapping[int, Record | None]) -> str:
    """The sentence on ranks that stand in different lines of the program; empty when they stand in the same.

    `calls` is what each rank called as its operation of one number. Ranks that are in one operation and one line, and
    differ in a size or an option, have come to the same place: nothing to tell.
    """
    places: dict[str, list[int]] = {}
    for rank, call in calls.items():
        places.setdefault(_place(call), []).append(rank)
    if len(places) < 2:
        return ""
    # The few who went astray come first; of two ranks the lower, since it is rank 0 that does extra work.
    (place, who), *others = sorted(places.items(), key=lambda item: (len(item[1]), item[1]))
    if place == _NOTHING:
        (place, who), others = others[0], [(place, who), *others[1:]]
    absent = sorted(rank for _, away in others for rank in away)
    if len(others) == 1:
        instead = f"{_they(absent)} {_are(absent, others[0][0])}"
    else:
        instead = "; ".join(f"{ranks(away)} {_are(away, there)}" for there, away in others)
    have = "has" if len(absent) == 1 else "have"
    return f"{_start(who)} {_are(who, place)}, which {ranks(absent)} {have} not reached: {instead}."


def tell_left_alone(mine: Record, here: Sequence[int], gone: Sequence[int], behind: Mapping[int, str]) -> str:
    """The sentence on an operation whose missing ranks have ended in good order: they can never come.

    `here` are the ranks that have come to `mine`, `gone` those that have left, `behind` where the rest is.
    """
    rest = "".join(f"; rank {rank} {where}" for rank, where in behind.items())
    return f"{_start(here)} {_are(here, mine.place)}, which {ranks(list(gone))} can never reach{rest}."


_NOTHING = ""


def _place(call: Record | None) -> str:
    return call.place if call is not None else _NOTHING


def _are(who: Sequence[int], place: str) -> str:
    if place == _NOTHING:
        return "has called nothing yet" if len(who) == 1 else "have called nothing yet"
    return f"{'is' if len(who) == 1 else 'are'} in {place}"


def _they(who: Sequence[int]) -> str:
    return "it" if len(who) == 1 else "they"


def _start(who: Sequence[int]) -> str:
    said = ranks(list(who))
    return said[0].upper() + said[1:]


def tell_earlier_parting(records: Sequence[Sequence[Record]], before: int) -> str:
    """The sentence on the latest operation before number `before` that the ranks called from different lines, if any.

    Calls that are alike are no disagreement, but one that is answered by another line's is how ranks fall out of step:
    the operation that fails is then the next but one.
    """
    by_rank = [{r.seq: r for r in of_rank if r.is_numbered_call and r.seq < before} for of_rank in records]
    for number in sorted(set.intersection(*map(set, by_rank)), reverse=True):
        calls = [of_rank[number] for of_rank in by_rank]
        if len({call.site for call in calls}) > 1:
            where = ", ".join(f"rank {rank} at {call.site}" for rank, call in enumerate(calls[:8]) if call.site)
            return f"They had called {calls[0].label} from different lines, too: {where}."
    return ""
