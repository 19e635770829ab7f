"""Choose the cheapest algorithm between hosts: apply the α-β-γ model to the schedules themselves.

    α  seconds of latency per message        Link.latency_s
    β  seconds per byte on a port            1 / Link.bytes_per_s
    γ  seconds per byte that is combined     1 / _REDUCE_BYTES_PER_S

A transfer takes α·m + β·n + γ·k, where m messages and n bytes pass through the busier of its two ports in the step, and
the receiver combines k bytes in the step. Ports are full duplex. A step takes as long as its longest transfer, and the
next step starts when all transfers are complete. Every rank has its own host.

Source: Hockney (1994) for α and β; Thakur, Rabenseifner and Gropp (2005) for γ and its use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from phalanx._comm.schedules.algorithms import build, offering
from phalanx._comm.schedules.network import Link, Topology
from phalanx._comm.schedules.schedule import Operation, Schedule, Transfer

ETHERNET = Link(latency_s=30e-6, bytes_per_s=125e6)
"""The link assumed between hosts. A measured link could change the algorithm, and with it the result's bits."""

_REDUCE_BYTES_PER_S = 8e9
# Times within this factor count as equal: measured times deviate from the model by as much.
_CLOSE = 1.1


def cheapest(operation: Operation, nbytes: int, num_hosts: int, link: Link = ETHERNET) -> str:
    """Return the name of the cheapest algorithm; the same arguments give the same name on every rank.

    Cost: visits each transfer of each algorithm, but only one step of a phase whose steps are alike. Callers cache the
        result.
    """
    topology = Topology.flat(num_hosts)
    # With one rank per host, the hierarchical algorithm is a ring, and no ranks share memory.
    names = [one.name for one in offering(operation) if not one.one_host and one.name != "hierarchical"]
    seconds = [seconds_of(build(name, operation, topology), nbytes, link) for name in names]
    # Of equally fast algorithms, take the first in `ALGORITHMS`: a ring needs only two connections per rank.
    return next(name for name, one in zip(names, seconds, strict=True) if one <= min(seconds) * _CLOSE)


def seconds_of(schedule: Schedule, nbytes: float, link: Link) -> float:
    """Return the seconds that `schedule` takes in the model, for buffers of `nbytes`."""
    bytes_per_chunk = nbytes / schedule.num_chunks
    seconds = 0.0
    for phase in schedule.phases:
        repeats = phase.num_steps if phase.alike else 1
        for step in range(phase.num_steps // max(1, repeats)):
            seconds += repeats * _longest(list(phase.transfers(step)), bytes_per_chunk, link)
    return seconds


def _longest(transfers: Sequence[Transfer], bytes_per_chunk: float, link: Link) -> float:
    """Return the seconds that the longest of the `transfers` of one step takes."""
    messages: defaultdict[tuple[str, int], int] = defaultdict(int)
    chunks: defaultdict[tuple[str, int], int] = defaultdict(int)
    combined: defaultdict[int, int] = defaultdict(int)
    for t in transfers:
        for port in (("out", t.src), ("in", t.dst)):
            messages[port] += 1
            chunks[port] += t.width
        if t.kind == "reduce":
            combined[t.dst] += t.width
    return max(
        (
            max(messages["out", t.src], messages["in", t.dst]) * link.latency_s
            + max(chunks["out", t.src], chunks["in", t.dst]) * bytes_per_chunk / link.bytes_per_s
            + (combined[t.dst] if t.kind == "reduce" else 0) * bytes_per_chunk / _REDUCE_BYTES_PER_S
            for t in transfers
        ),
        default=0.0,
    )
