"""MPI carries the bytes through mpi4py, whatever MPI the job was started with.

runtime   the MPI of this process: found, started once, ended in order
polling   waiting for MPI with a deadline
engine    messages between the ranks of a group; how a rank says that it leaves

Every call into MPI returns at once, and waiting is asking again: so each wait has a deadline, and Ctrl-C ends it.
Calls come from several threads, which MPI must allow (MPI_THREAD_MULTIPLE).
"""

from __future__ import annotations

from phalanx._comm.engines.mpi.engine import EngineClosed, MpiEngine, PeerLeft, PendingOperation, TimedOut
from phalanx._comm.engines.mpi.runtime import Launcher, Runtime, start, why_not

__all__ = [
    "EngineClosed",
    "Launcher",
    "MpiEngine",
    "PeerLeft",
    "PendingOperation",
    "Runtime",
    "TimedOut",
    "start",
    "why_not",
]
