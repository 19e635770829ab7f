"""Choose an algorithm: the one that the cost model says is fastest, or the one that was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.collectives.algorithms import find, fits, offering
from phalanx.collectives.closed_form import predict
from phalanx.collectives.network import Links, Topology
from phalanx.collectives.schedule import Operation
from phalanx.collectives.units import format_bytes, format_seconds

# Predictions that are closer than this say nothing: measured runs are as far from them (benchmarks/algorithms).
_CLOSE = 1.1


@dataclass(frozen=True)
class Choice:
    """A choice has the algorithm, the predicted seconds of every candidate (fastest first), and the reason in words."""

    algorithm: str
    predicted: tuple[tuple[str, float], ...]
    why: str


def choose(operation: Operation, nbytes: int, topology: Topology, links: Links, algorithm: str | None = None) -> Choice:
    """Choose for buffers of `nbytes`; the same arguments give the same choice on every rank.

    `algorithm` forces one, and is still compared with the others. The work grows with the number of ranks where no
    formula exists, so callers keep the answer.

    Raises:
        ValueError: an unknown algorithm or operation, one that does not offer it, or cannot run on this topology.
    """
    candidates = [candidate.name for candidate in offering(operation) if fits(candidate, topology)]
    forced = find(algorithm).name if algorithm is not None else None
    if forced is not None and forced not in candidates:
        predict(forced, operation, nbytes, topology, links)  # raises, saying why it is not a candidate
    times = [(predict(name, operation, nbytes, topology, links).seconds, i) for i, name in enumerate(candidates)]
    predicted = tuple((candidates[i], seconds) for seconds, i in sorted(times))
    # Times that are close go to the one that `ALGORITHMS` lists first: a ring keeps to two connections.
    close = min(i for seconds, i in times if seconds <= predicted[0][1] * _CLOSE)
    chosen = forced or candidates[close]
    return Choice(chosen, predicted, _why(operation, nbytes, topology, chosen, dict(predicted), forced is not None))


def _why(
    operation: str, nbytes: int, topology: Topology, chosen: str, predicted: dict[str, float], forced: bool
) -> str:
    ranks, hosts = topology.world_size, len(topology.hosts)
    place = f"{operation} of {format_bytes(nbytes)} over {_count(ranks, 'rank')} on {_count(hosts, 'host')}"
    others = [name for name in predicted if name != chosen]
    fastest = min(predicted.values())
    if forced:
        said = "was asked for"
    else:
        said = "is predicted to be fastest" if predicted[chosen] == fastest else "is predicted to be as fast as any"
    why = f"{place}: {chosen} {said} ({format_seconds(predicted[chosen])})"
    if others:
        best = others[0]
        why += f"; {'the fastest other' if forced else 'next'} is {best} ({format_seconds(predicted[best])})"
    return why


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
