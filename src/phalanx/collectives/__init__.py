"""Describe collectives as schedules: who combines what with whom in which step.

Algorithms are data that is executed, proved, printed and drawn from the same source. All of it is pure and torch-free.
"""

from phalanx.collectives.algorithms import ALGORITHMS, build
from phalanx.collectives.network import Link, Topology
from phalanx.collectives.play import play
from phalanx.collectives.schedule import Schedule, Transfer
from phalanx.collectives.symbolic import check

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
