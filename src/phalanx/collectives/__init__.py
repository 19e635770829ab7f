"""Describe collectives as schedules (who combines what with whom in which step), and choose between algorithms.

Algorithms are data that is executed, proved, printed, priced and simulated from the same source. All of it is pure, and
works without torch.
"""

from phalanx.collectives.algorithms import ALGORITHMS, build
from phalanx.collectives.choose import Choice, choose
from phalanx.collectives.execute import execute, play
from phalanx.collectives.network import Link, Links, Topology
from phalanx.collectives.schedule import Schedule, Transfer
from phalanx.collectives.symbolic import check

__all__ = [
    "ALGORITHMS",
    "Choice",
    "Link",
    "Links",
    "Schedule",
    "Topology",
    "Transfer",
    "build",
    "check",
    "choose",
    "execute",
    "play",
]
