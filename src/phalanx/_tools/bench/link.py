"""Measure the time of messages between hosts, and fit the `Link` from which Phalanx chooses algorithms.

The pairs of hosts are measured one after another. One rank on each of the two hosts sends to and receives from its peer
at the same time, as in a step of a collective, while all other ranks wait.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from phalanx._base.deadline import Deadline
from phalanx._base.host_addresses import interface_addresses
from phalanx._comm.backend.torch_integration.groups import phalanx_group
from phalanx._comm.schedules.network import Link
from phalanx._comm.transport.hierarchical.rails import RailMessage
from phalanx._comm.transport.hierarchical.transport import HierarchicalTransport
from phalanx.errors import PhalanxError

SIZES = (8, 4 * 2**10, 64 * 2**10, 2**20, 8 * 2**20)
_NUM_WARMUP = 2
_TIMEOUT_S = 600.0
_TAG = 0


@dataclass(frozen=True)
class LinkMeasurement:
    """A `LinkMeasurement` has the link between two hosts, and the median seconds of an exchange by message size."""

    hosts: tuple[str, str]
    link: Link
    seconds: dict[int, float]


def measure(transport: HierarchicalTransport, names: Sequence[str], rounds: int) -> list[LinkMeasurement]:
    """Measure the link between each pair of hosts. All ranks of the group call this; the result is the same on all.

    Arguments:
        names: the name of each rank's host in messages.

    Raises:
        PeerLostError, DeadlineError: a rank died, or the exchanges of a pair took longer than ten minutes.
    """
    hosts = transport.layout.topology.hosts
    measured = []
    for one, other in itertools.combinations(hosts, 2):
        dist.barrier()
        pair = (one[0], other[0])
        mine = _exchange(transport, pair, rounds) if transport.rank in pair else {}
        everybody: list[dict[int, float]] = [{} for _ in range(transport.world_size)]
        dist.all_gather_object(everybody, mine)
        # An exchange takes as long as on its slower side.
        seconds = {size: max(everybody[r][size] for r in pair) for size in SIZES}
        measured.append(LinkMeasurement((names[pair[0]], names[pair[1]]), find_link(seconds), seconds))
    return measured


def find_link(seconds: Mapping[int, float]) -> Link:
    """Return the link that fits the seconds of exchanges by message size; at least two sizes are needed.

    The smallest size determines the latency. The difference between the two largest sizes determines the bandwidth:
    switches and clouds forward an initial burst faster.
    """
    few, *_, large, largest = sorted(seconds) if len(seconds) > 2 else (min(seconds), *sorted(seconds))
    longer_s = seconds[largest] - seconds[large]
    bytes_per_s = (largest - large) / longer_s if longer_s > 0 else largest / seconds[largest]
    return Link(seconds[few], bytes_per_s)


def _exchange(transport: HierarchicalTransport, pair: tuple[int, int], rounds: int) -> dict[int, float]:
    peer = pair[1] if transport.rank == pair[0] else pair[0]
    engine, deadline = transport.engine, Deadline.after(_TIMEOUT_S)
    result = {}
    for size in SIZES:
        sent, got = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        times = []
        for _ in range(_NUM_WARMUP + rounds):
            begin = time.perf_counter()
            messages = [
                RailMessage(engine.recv(peer, got, _TAG), peer, deadline),
                RailMessage(engine.send(peer, sent, _TAG), peer, deadline),
            ]
            for message in messages:
                message.wait()
            times.append(time.perf_counter() - begin)
        result[size] = statistics.median(times[_NUM_WARMUP:])
    return result


def slowest(measured: Sequence[LinkMeasurement]) -> Link:
    """Return a link with the worst latency and bandwidth of all: a collective is as slow as its slowest link."""
    latency_s = max(one.link.latency_s for one in measured)
    return Link(latency_s, min(one.link.bytes_per_s for one in measured))


def is_slow(one: LinkMeasurement, measured: Sequence[LinkMeasurement]) -> bool:
    """Return whether a link has less than half of the fastest link's bandwidth."""
    return one.link.bytes_per_s < max(each.link.bytes_per_s for each in measured) / 2


def as_option(link: Link) -> str:
    """Return the `pg_options` expression for a link, with as many digits as the measurement supports."""
    numbers = f"latency_s={link.latency_s:.2g}, bytes_per_s={link.bytes_per_s:.3g}"
    return f"phalanx.Options(link=phalanx.collectives.Link({numbers}))"


def _own_name() -> str:
    """Return this host's name and address, as in 'node3 (10.0.0.3)', because hosts may have identical names."""
    addresses = [of_one[0] for name, of_one in interface_addresses().items() if name != "lo"]
    return f"{os.uname().nodename} ({addresses[0]})" if addresses else os.uname().nodename


def run(rounds: int, print_line: Callable[[str], None], *, in_json: bool) -> None:
    """Run the command on one rank of a job on several hosts; rank 0 prints the results.

    Raises:
        PhalanxError: all ranks are on one host, so there is no link.
    """
    dist.init_process_group("phalanx")
    try:
        group = phalanx_group(dist.group.WORLD)
        transport = None if group is None else group.transport
        if not isinstance(transport, HierarchicalTransport):
            raise PhalanxError("bench link: all ranks of this job are on one host, so there is no link between hosts.")
        names: list[str] = [""] * transport.world_size
        dist.all_gather_object(names, _own_name())
        measured = measure(transport, names, rounds)
    finally:
        dist.destroy_process_group()
    if transport.rank != 0:
        return
    link = slowest(measured)
    if in_json:
        words = {
            "links": [
                {
                    "hosts": one.hosts,
                    "latency_s": one.link.latency_s,
                    "bytes_per_s": one.link.bytes_per_s,
                    "seconds": one.seconds,
                }
                for one in measured
            ],
            "options": as_option(link),
        }
        print_line(json.dumps(words, indent=2))
        return
    for one in measured:
        mbit = one.link.bytes_per_s * 8e-6
        slow = "   <-- slow" if is_slow(one, measured) else ""
        print_line(
            f"{one.hosts[0]} <-> {one.hosts[1]}: {one.link.latency_s * 1e6:.0f} µs and {mbit:.0f} Mbit/s each way{slow}"
        )
    print_line(f"Use it, the same on every rank:\n    pg_options={as_option(link)}")
