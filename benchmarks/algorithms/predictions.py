"""What the model says that a measured run should take, from what messages alone took."""

from __future__ import annotations

from phalanx.collectives import Links, Topology, build, hierarchical
from phalanx.collectives.closed_form import predict
from phalanx.collectives.segments import in_segments
from phalanx.collectives.simulate import simulate
from phalanx.transport.hierarchical.segments import Ticks
from phalanx.transport.hierarchical.small import ALWAYS_SMALL_BYTES


def of_schedule(algorithm: str, nbytes: int, topology: Topology, links: Links) -> tuple[float, float]:
    """Seconds of the schedule as `execute` carries it out: played rank by rank, and by formula."""
    played = simulate(build(algorithm, "all_reduce", topology), nbytes, topology, links)
    return played.seconds, predict(algorithm, "all_reduce", nbytes, topology, links).seconds


def of_backend(algorithm: str, nbytes: int, topology: Topology, links: Links, empty_s: float) -> tuple[float, float]:
    """Seconds of the backend's all_reduce: played rank by rank in the backend's segments, and whole.

    It adds up in the memory of each host, runs `algorithm` between the hosts, and gathers in memory. `empty_s` is what
    it takes for nothing: the ranks agree.
    """
    if nbytes <= ALWAYS_SMALL_BYTES:  # the tensor travels with what the ranks agree on, whatever the algorithm
        return empty_s, empty_s
    whole = build(algorithm, "all_reduce", Topology.flat(len(topology.hosts)))
    num_segments = Ticks.of(nbytes, whole.num_steps).num_segments
    if not topology.is_flat:
        whole = hierarchical.all_reduce(topology, whole)
    segments = in_segments(whole, num_segments)
    executed_s, whole_s = (simulate(schedule, nbytes, topology, links).seconds for schedule in (segments, whole))
    return empty_s + executed_s, empty_s + whole_s
