"""MPI through mpi4py's buffer interface: Open MPI, MPICH and Intel MPI alike. The variety says nothing here."""

from __future__ import annotations

from functools import partial

import numpy as np
from cases import ROOT, Case
from mpi4py import MPI

from contestants.contract import BoundCall, Contestant, Options


class MpiContestant:
    """A rank of MPI_COMM_WORLD; the buffers are described once, so a call costs what a C program's would, nearly."""

    def __init__(self, max_count: int) -> None:
        self._world = MPI.COMM_WORLD
        self._source, self._target = np.zeros(max_count, np.float32), np.zeros(max_count, np.float32)

    def bind(self, case: Case) -> BoundCall:
        source, target = self._source[: case.source_count], self._target[: case.target_count]
        if case.op in ("all_reduce", "broadcast"):
            target = source  # the same work as torch.distributed's: in place
        # Described as plain memory, which costs mpi4py less per call than an array that it must ask for its buffer.
        send = [MPI.buffer.frombuffer(source), MPI.FLOAT]
        receive = [MPI.buffer.frombuffer(target), MPI.FLOAT]
        call = {
            "all_reduce": partial(self._world.Allreduce, MPI.IN_PLACE, receive, MPI.SUM),
            "broadcast": partial(self._world.Bcast, receive, ROOT),
            "all_gather": partial(self._world.Allgather, send, receive),
            "reduce_scatter": partial(self._world.Reduce_scatter_block, send, receive, MPI.SUM),
            "all_to_all": partial(self._world.Alltoall, send, receive),
        }[case.op]
        return BoundCall(call, source, target)

    def barrier(self) -> None:
        self._world.Barrier()

    def close(self) -> None:
        MPI.Finalize()


def connect(rank: int, world_size: int, max_count: int, options: Options) -> Contestant:
    """Importing mpi4py has initialised MPI; what is left is to see that mpiexec and we count alike.

    Raises:
        RuntimeError: MPI's rank or size is not what the driver was told.
    """
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank, world_size):
        raise RuntimeError(f"MPI says rank {world.rank} of {world.size}, the driver said {rank} of {world_size}")
    return MpiContestant(max_count)
