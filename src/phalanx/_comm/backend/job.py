"""`init` joins the job that this process belongs to, whichever launcher started it, and returns a `Job`."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from phalanx._base.deadline import Deadline
from phalanx._base.log import get_logger, warn_once
from phalanx._comm.backend.rendezvous import join, join_siblings, ranks_per_gpu
from phalanx._comm.backend.start import refuse_unknown_backend
from phalanx._comm.rendezvous.launchers import LaunchedProcess, find_incomplete_environment, find_launch

_logger = get_logger(__name__)
_GPU_BACKENDS = {"phalanx", "nccl"}


class Job:
    """A `Job` is this process's rank and device in the job. As a context manager, it leaves the job on exit."""

    def __init__(self, rank: int, world_size: int, local_rank: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.device = device

    @property
    def is_main(self) -> bool:
        """Return whether this is the rank that prints and saves."""
        return self.rank == 0

    def close(self) -> None:
        """Leave the job by destroying the process group. A second call does nothing."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Job(rank={self.rank}, world_size={self.world_size}, device={str(self.device)!r})"


def init(
    backend: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    timeout: float | timedelta = 1800.0,
) -> Job:
    """Join the job as a rank of `phalanx run`, torchrun, mpiexec or srun; without a launcher, start a job of one rank.

    `backend` defaults to "phalanx". `timeout` (seconds) limits each operation of the group. An existing process group
    is used as it is.

    `rank` and `world_size` are for processes that a program starts itself (mp.spawn). They find each other through the
    process that started them, or at `init_method` or MASTER_ADDR and MASTER_PORT, as in torch.

    Raises:
        ValueError: a variable or argument shows that this process is one of several, but its rank or the address of the
            rendezvous is unknown; or `rank` and `world_size` do not fit together; or torch does not know the backend.
        DeadlineError: some rank did not join; the message names it.
    """
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if (rank is None) != (world_size is None):
        raise ValueError(f"phalanx.init: rank and world_size go together, got rank={rank}, world_size={world_size}")
    launch = None
    if not dist.is_initialized():
        name = backend or "phalanx"
        refuse_unknown_backend(name, "phalanx.init")
        if rank is not None and world_size is not None:
            _join_as(name, rank, world_size, init_method, limit)
        elif "RANK" in os.environ or init_method is not None or name == "mpi":  # MPI determines the rank
            _join_environment(name, init_method, limit)
        elif (launch := find_launch(os.environ)) is not None:
            _join_launch(name, launch, limit)
        elif variables := find_incomplete_environment(
            os.environ, is_spawned=multiprocessing.parent_process() is not None
        ):
            raise ValueError(_explain_incomplete_environment(variables))
        else:
            dist.init_process_group(name, store=HashStore(), rank=0, world_size=1, timeout=limit)
    local_rank = _local_rank()
    return Job(dist.get_rank(), dist.get_world_size(), local_rank, _device(local_rank))


def _join_as(name: str, rank: int, world_size: int, init_method: str | None, limit: timedelta) -> None:
    """Join as `rank`, which the program itself passed."""
    if not 0 <= rank < world_size:
        raise ValueError(f"phalanx.init: rank {rank} of {world_size}: ranks are 0 to world_size - 1")
    if init_method is not None or all(variable in os.environ for variable in ("MASTER_ADDR", "MASTER_PORT")):
        dist.init_process_group(name, init_method, rank=rank, world_size=world_size, timeout=limit)
    elif world_size == 1:
        dist.init_process_group(name, store=HashStore(), rank=0, world_size=1, timeout=limit)
    elif multiprocessing.parent_process() is not None:
        secret = bytes(multiprocessing.current_process().authkey)
        store, _, _ = join_siblings(rank, world_size, secret, Deadline.after(limit))
        dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=limit)
    else:
        raise ValueError(
            f"phalanx.init: rank {rank} of {world_size} has no rendezvous address.\n"
            "Pass init_method= (tcp://host:port, file:///path), or set MASTER_ADDR and MASTER_PORT."
        )


def _join_environment(name: str, init_method: str | None, limit: timedelta) -> None:
    """Join as the rank in the environment, at `init_method` if given."""
    rank, world_size = -1, -1
    if init_method is not None and not init_method.startswith("env://"):
        launch = find_launch(os.environ)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        elif launch is not None:
            rank, world_size = launch.rank, launch.world_size
        else:
            raise ValueError(
                f"phalanx.init: init_method={init_method!r} sets the rendezvous address, but the rank of this "
                "process is unknown.\nPass rank= and world_size= as well."
            )
    dist.init_process_group(name, init_method, timeout=limit, rank=rank, world_size=world_size)


def _join_launch(name: str, launch: LaunchedProcess, limit: timedelta) -> None:
    """Join as the rank that mpiexec or Slurm has started, also with torch's backends, which support neither."""
    if name == "phalanx":
        dist.init_process_group(name, timeout=limit)
    else:
        store, rank, world_size = join(launch, Deadline.after(limit))
        dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=limit)


def _explain_incomplete_environment(variables: str) -> str:
    return (
        f"phalanx.init: this process is one of several ({variables}), but its rank or the rendezvous "
        "address is unknown. Each process would train alone and write the same files.\n"
        "Pass rank= and world_size= (phalanx.init(rank=rank, world_size=n)); or set RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT; or start the script with `phalanx run`. To train alone, call phalanx.init(rank=0, "
        "world_size=1)."
    )


def _local_rank() -> int:
    variables = os.environ.get("LOCAL_RANK", "")
    if variables.isdecimal():
        return int(variables)
    launch = find_launch(os.environ)
    if launch is not None and (launch.rank, launch.world_size) == (dist.get_rank(), dist.get_world_size()):
        return launch.local_rank
    return dist.get_rank()


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus, ranks_here, backend = torch.cuda.device_count(), _ranks_here(), _backend_of_cuda()
    device = decide_device(local_rank, ranks_here, gpus, ranks_per_gpu(), backend)
    if gpus and device.type == "cpu":
        reason = (
            f"this host has {gpus} GPUs for {ranks_here or 'more'} ranks. Start one per GPU, or pass --ranks-per-gpu "
            "to `phalanx run`"
            if backend in _GPU_BACKENDS
            else f"{f'backend {backend!r}' if backend else 'the group'} is for the CPU only. For a GPU, omit "
            "backend=, or pass 'nccl'"
        )
        warn_once(_logger, f"phalanx.init: this rank uses the CPU: {reason}")
    return device


def _ranks_here() -> int | None:
    """Return the number of the job's ranks on this host; None if only this process's local rank is known."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    launch = find_launch(os.environ)
    if told.isdecimal():
        return int(told)
    if launch is not None and launch.local_size:
        return launch.local_size
    return None if os.environ.get("LOCAL_RANK", "").isdecimal() else dist.get_world_size()


def _backend_of_cuda() -> str | None:
    name = dist.get_backend()  # "phalanx", whose devices are not all known at the start; or a pair for each device
    return find_cuda_backend(name if name == "phalanx" else dist.get_backend_config())


def find_cuda_backend(config: str) -> str | None:
    """Return a group's backend for CUDA tensors: "nccl" for "cpu:gloo,cuda:nccl"; None if there is none.

    A configuration without devices names one backend for all devices that the backend supports.
    """
    pairs = dict(pair.split(":", 1) for pair in config.lower().split(",") if ":" in pair)
    return pairs.get("cuda") if pairs else config.lower()


def decide_device(
    local_rank: int, ranks_here: int | None, gpus: int, ranks_per_gpu: int, backend: str | None
) -> torch.device:
    """Return the device for a rank on a host with `gpus` GPUs, each shared by `ranks_per_gpu` neighbours.

    If there are more ranks than the GPUs have room for, all ranks get the CPU; with NCCL, which supports only GPUs,
    they get the GPUs in turn. With Gloo or MPI as `backend`, they get the CPU: a rank that needs a GPU selects it
    itself. If `ranks_here` is unknown, each rank for which the GPUs have room gets a GPU.
    """
    room = gpus * ranks_per_gpu
    fits = local_rank < room if ranks_here is None else ranks_here <= room
    if gpus and backend in _GPU_BACKENDS and (fits or backend == "nccl"):
        return torch.device("cuda", local_rank // ranks_per_gpu % gpus)
    return torch.device("cpu")
