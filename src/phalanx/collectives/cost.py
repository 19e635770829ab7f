"""Compute what a schedule costs on a network by the α-β-γ model, from the schedule itself.

    α  seconds of latency per message        Link.latency_s
    β  seconds per byte on a port            1 / Link.bytes_per_s
    γ  seconds per byte that is combined     1 / Links.reduce_bytes_per_s

A transfer of a step takes α·m + β·n + γ·k: m messages of that rank in that direction, n bytes through the busier of the
two ports, k bytes that the receiver combines in the step. A port carries both directions at once and is shared by all
that passes it: the rank's own port inside a host, the host's port between hosts. A step takes as long as its longest
transfer, and the next one starts when all are through (`simulate` lets each rank go on when it can).

Chunks count as exactly S/C bytes, where execution rounds to whole elements.

Source: Hockney (1994) for α and β; Thakur, Rabenseifner and Gropp (2005) for γ and the use made of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.collectives.network import Links, Topology
from phalanx.collectives.schedule import Phase, Schedule, Transfer


@dataclass(frozen=True)
class Cost:
    """A cost has the steps, the bytes that the busiest rank sends or receives (the larger), and the predicted time."""

    steps: int
    busiest_bytes: float
    seconds: float


def of_schedule(schedule: Schedule, nbytes: float, topology: Topology, links: Links) -> Cost:
    """Return the cost of `schedule` for buffers of `nbytes`; this looks at each transfer, once where a phase repeats
    its steps.
    """
    require_fit(schedule, nbytes, topology)
    bytes_per_chunk = nbytes / schedule.num_chunks
    sent, received = [0] * schedule.world_size, [0] * schedule.world_size
    seconds = 0.0
    for phase in schedule.phases:
        repeats = phase.num_steps if phase.alike else 1
        for step in range(phase.num_steps // max(1, repeats)):
            transfers = list(phase.transfers(step))
            for t in transfers:
                sent[t.src] += t.width * repeats
                received[t.dst] += t.width * repeats
            seconds += repeats * max(durations(phase, transfers, bytes_per_chunk, topology, links), default=0.0)
    return Cost(schedule.num_steps, max(*sent, *received) * bytes_per_chunk, seconds)


def durations(
    phase: Phase, transfers: Sequence[Transfer], bytes_per_chunk: float, topology: Topology, links: Links
) -> list[float]:
    """Return the seconds that each of the `transfers` of one step takes, given all the others."""
    host_of = topology.host_of
    # Keys are ranks inside a host; between hosts they are negative: -1 - rank for messages, -1 - host for ports.
    messages_out: defaultdict[int, int] = defaultdict(int)
    messages_in: defaultdict[int, int] = defaultdict(int)
    width_out: defaultdict[int, int] = defaultdict(int)
    width_in: defaultdict[int, int] = defaultdict(int)
    combined: defaultdict[int, int] = defaultdict(int)
    for src, dst, start, stop, kind in transfers:
        width, src_host, dst_host = stop - start, host_of[src], host_of[dst]
        inside = src_host == dst_host
        messages_out[src if inside else -1 - src] += 1
        messages_in[dst if inside else -1 - dst] += 1
        width_out[src if inside else -1 - src_host] += width
        width_in[dst if inside else -1 - dst_host] += width
        if kind == "reduce":
            combined[dst] += width

    seconds = []
    for src, dst, _, _, kind in transfers:
        src_host, dst_host = host_of[src], host_of[dst]
        inside = src_host == dst_host
        link = links.intra if inside else links.inter
        port_in = width_in[dst if inside else -1 - dst_host]
        if phase.one_sided:  # the reader pays: one latency for the barrier, and its own reading
            messages, width = 1, port_in
        else:
            messages = max(messages_out[src if inside else -1 - src], messages_in[dst if inside else -1 - dst])
            width = max(width_out[src if inside else -1 - src_host], port_in)
        time = messages * link.latency_s + width * bytes_per_chunk / link.bytes_per_s
        if kind == "reduce":
            time += combined[dst] * bytes_per_chunk / links.reduce_bytes_per_s
        seconds.append(time)
    return seconds


def require_fit(schedule: Schedule, nbytes: float, topology: Topology) -> None:
    """Raise ValueError unless the topology has the schedule's ranks and the size is not negative."""
    if topology.world_size != schedule.world_size:
        raise ValueError(f"the topology has {topology.world_size} ranks, the schedule {schedule.world_size}")
    if not nbytes >= 0:
        raise ValueError(f"nbytes must be zero or more, got {nbytes}")
