"""Compute the costs of algorithms by formulas in P, for any number of ranks at once, if all links in play are alike.

P ranks, S bytes, L = ⌈log2 P⌉, Q = the power of two at or below P, q = log2 Q, H hosts of R ranks each.

    all_reduce         steps             time
    ring               2(P-1)            2(P-1)α + 2(P-1)/P·Sβ + (P-1)/P·Sγ
    tree               2L                2Lα + 2L·Sβ + L·Sγ
    halving_doubling   2q                2qα + 2(Q-1)/Q·Sβ + (Q-1)/Q·Sγ
                       2q+2 if P > Q     … + 2α + 2Sβ + Sγ
    doubling           q                 qα + q·Sβ + q·Sγ
                       q+2 if P > Q      … + 2α + 2Sβ + Sγ
    single             2(P-1)            2(P-1)α + 2(P-1)·Sβ + (P-1)·Sγ
    direct             2                 2α + 2(P-1)/P·Sβ + (P-1)/P·Sγ
    hierarchical       2 + 2(H-1)        direct of R ranks on S inside, a ring of H hosts on S between,
                                         of which a rank combines (H-1)/H·S/R; no steps inside if R = 1

Each agrees with `cost.of_schedule`, which tests compare; where there is no formula the schedule is asked.
"""

from __future__ import annotations

from phalanx.collectives.algorithms import build, find
from phalanx.collectives.cost import Cost, of_schedule, require_fit
from phalanx.collectives.network import Link, Links, Topology
from phalanx.collectives.schedule import Operation


def predict(algorithm: str, operation: Operation, nbytes: float, topology: Topology, links: Links) -> Cost:
    """Return the cost by formula where there is one, else from the schedule. Raises ValueError as `build` does."""
    schedule = build(algorithm, operation, topology)
    require_fit(schedule, nbytes, topology)
    formula = closed_form(find(algorithm).name, operation, nbytes, topology, links)
    return formula or of_schedule(schedule, nbytes, topology, links)


def closed_form(algorithm: str, operation: Operation, nbytes: float, topology: Topology, links: Links) -> Cost | None:
    """Return the cost by formula; None where there is none: unequal links, or a case the formulas do not cover."""
    if topology.world_size == 1:
        return Cost(0, 0.0, 0.0)
    if algorithm == "hierarchical":
        return _hierarchical(nbytes, topology, links) if operation == "all_reduce" else None
    if topology.is_flat:
        link = links.inter
    elif len(topology.hosts) == 1:
        link = links.intra
    else:
        return None
    return _uniform(algorithm, operation, topology.world_size, nbytes, link, 1 / links.reduce_bytes_per_s)


def _uniform(algorithm: str, operation: Operation, p: int, s: float, link: Link, gamma: float) -> Cost | None:
    part = s * (p - 1) / p
    levels = (p - 1).bit_length()
    q = p.bit_length() - 1
    match algorithm, operation:
        case "ring", "all_reduce":
            return _cost(2 * (p - 1), 2 * part, part, link, gamma)
        case "ring", "reduce_scatter":
            return _cost(p - 1, part, part, link, gamma)
        case "ring", "all_gather":
            return _cost(p - 1, part, 0, link, gamma)
        case "direct", "all_reduce":
            return _cost(2, 2 * part, part, link, gamma)
        case "direct", "reduce_scatter":
            return _cost(1, part, part, link, gamma)
        case "direct", "all_gather":
            return _cost(1, part, 0, link, gamma)
        case "single", "all_reduce":
            return _both_ways(p - 1, s, link, gamma)
        case "single", "reduce":
            return _cost(p - 1, (p - 1) * s, (p - 1) * s, link, gamma)
        case "single", "broadcast":
            return _cost(p - 1, (p - 1) * s, 0, link, gamma)
        case "tree", "all_reduce":
            return _both_ways(levels, s, link, gamma)
        case "tree", "reduce":
            return _cost(levels, levels * s, levels * s, link, gamma)
        case "tree", "broadcast":
            return _cost(levels, levels * s, 0, link, gamma)
        case "halving_doubling", "all_reduce":
            return _folded(p, 2 * q, 2 * s * (2**q - 1) / 2**q, s * (2**q - 1) / 2**q, s, link, gamma)
        case "doubling", "all_reduce":
            return _folded(p, q, q * s, q * s, s, link, gamma)
        case _:
            return None


def _cost(steps: int, nbytes: float, combined: float, link: Link, gamma: float) -> Cost:
    """Return the cost of `nbytes` that pass the busiest rank in the one direction that counts, one message a step."""
    return Cost(steps, nbytes, steps * link.latency_s + nbytes / link.bytes_per_s + combined * gamma)


def _both_ways(half: int, s: float, link: Link, gamma: float) -> Cost:
    """Return the cost of `half` whole buffers into one rank and as many out of it, one after the other."""
    seconds = 2 * half * (link.latency_s + s / link.bytes_per_s) + half * s * gamma
    return Cost(2 * half, half * s, seconds)


def _folded(p: int, steps: int, nbytes: float, combined: float, s: float, link: Link, gamma: float) -> Cost:
    """Return the cost of what the Q ranks do among themselves, and of a step before and after it for the folded
    ranks.
    """
    among = _cost(steps, nbytes, combined, link, gamma)
    if p & (p - 1) == 0:
        return among
    fold = _both_ways(1, s, link, gamma)
    return Cost(among.steps + fold.steps, among.busiest_bytes + fold.busiest_bytes, among.seconds + fold.seconds)


def _hierarchical(s: float, topology: Topology, links: Links) -> Cost | None:
    r, h = topology.ranks_per_host, len(topology.hosts)
    if r is None:
        return None
    gamma = 1 / links.reduce_bytes_per_s
    inside = _cost(2 if r > 1 else 0, 2 * s * (r - 1) / r, s * (r - 1) / r, links.intra, gamma)
    # The host's port carries the slices of its R ranks at once, so the bytes on the wire do not depend on R.
    between = _cost(2 * (h - 1), 2 * s * (h - 1) / h, s * (h - 1) / h / r, links.inter, gamma)
    return Cost(
        inside.steps + between.steps,
        inside.busiest_bytes + between.busiest_bytes / r,
        inside.seconds + between.seconds,
    )
