"""Join the job that this process is part of, however it was started."""

from __future__ import annotations

import os
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from phalanx.backend.rendezvous import mpi_launch


class Job:
    """This process's place in the job. As a context manager it leaves the job on exit."""

    def __init__(self, rank: int, world_size: int, local_rank: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.device = device

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints and saves."""
        return self.rank == 0

    def close(self) -> None:
        """Leave the job: the process group is destroyed. A second call does nothing."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Job(rank={self.rank}, world_size={self.world_size}, device={str(self.device)!r})"


def init(backend: str | None = None, *, timeout: float | timedelta = 1800.0) -> Job:
    """Join the job: under `phalanx run`, torchrun or mpiexec as one of its ranks, else alone, as a job of one.

    `backend` defaults to "phalanx". `timeout` (seconds) limits each operation of the group. If the process group is
    there already, it is used as it is.

    Raises:
        DeadlineError: some rank never came; the message names it.
    """
    span = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if not dist.is_initialized():
        name = backend or "phalanx"
        if _was_launched() or name == "mpi":  # MPI knows who we are, also alone
            dist.init_process_group(name, timeout=span)
        else:
            dist.init_process_group(name, store=HashStore(), rank=0, world_size=1, timeout=span)
    local_rank = _local_rank()
    return Job(dist.get_rank(), dist.get_world_size(), local_rank, _device(local_rank))


def _was_launched() -> bool:
    return "RANK" in os.environ or mpi_launch(os.environ) is not None


def _local_rank() -> int:
    launch = mpi_launch(os.environ)
    default = launch.local_rank if launch is not None else dist.get_rank() if "RANK" in os.environ else 0
    return int(os.environ.get("LOCAL_RANK", default))


def _device(local_rank: int) -> torch.device:
    """The device for a rank: the CPU, which is what backend 'phalanx' moves; a GPU where the group is NCCL's."""
    if dist.get_backend() == "nccl" and torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")
