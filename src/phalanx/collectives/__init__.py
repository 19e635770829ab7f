"""Build, check and run schedules of collectives: ring, tree, recursive halving and doubling, hierarchical."""

from phalanx._comm.schedules import ALGORITHMS, Link, Schedule, Topology, Transfer, build, check, play

__all__ = [
    "ALGORITHMS",
    "Link",
    "Schedule",
    "Topology",
    "Transfer",
    "build",
    "check",
    "play",
]
