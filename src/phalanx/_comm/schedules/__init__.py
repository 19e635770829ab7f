"""Describe collectives as schedules: which ranks combine which data in which step.

A schedule is data: the same object is executed, proved, printed and drawn. The code is pure, and imports no torch.
"""

from phalanx._comm.schedules.algorithms import ALGORITHMS, build
from phalanx._comm.schedules.network import Link, Topology
from phalanx._comm.schedules.play import play
from phalanx._comm.schedules.schedule import Schedule, Transfer
from phalanx._comm.schedules.symbolic import check

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
