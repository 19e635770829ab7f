"""An engine over MPI through mpi4py, for any MPI that started the job.

runtime   the MPI of this process: found, started once, polled with a deadline, finalized
engine    messages between the ranks of a group; how a rank leaves

Messages use only MPI calls that return at once, and waits poll: so each wait has a deadline, and Ctrl-C interrupts it.
Several threads call MPI, which must therefore provide MPI_THREAD_MULTIPLE.
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
