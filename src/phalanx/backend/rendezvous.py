"""`env://` where torch's own would fail or open a port: under `phalanx run`, and under `mpiexec`.

Both give every rank the same `FileStore` on memory without a name. Under `phalanx run` the agent owns that memory and
says where (PHALANX_STORE). Under `mpiexec` on one host rank 0 makes it and the others fetch it, by a name that follows
from the MPI job. Everything else is left to torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import PrefixStore

from phalanx.arena.handover import Counter, fetch
from phalanx.arena.nameless import memory
from phalanx.arena.watch import start_ticks
from phalanx.deadline import Deadline
from phalanx.errors import DeadlineError, PhalanxError

Meeting = tuple[Any, int, int]
Handler = Callable[..., Iterator[Meeting]]


@dataclass(frozen=True)
class Launch:
    """Who this process is, as its launcher says. `local_size` is 0 where the launcher does not say."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int


# What each MPI tells its processes: (rank, size, local rank, local size).
_MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def mpi_launch(environment: Mapping[str, str]) -> Launch | None:
    """What an `mpiexec` says of this process (MPICH and Intel MPI speak alike), or None."""
    for launcher, (rank, size, local_rank, local_size) in _MPI.items():
        if rank in environment and size in environment:
            return Launch(
                launcher,
                int(environment[rank]),
                int(environment[size]),
                int(environment.get(local_rank, environment[rank])),
                int(environment.get(local_size, 0)),
            )
    return None


def env_rendezvous(original: Handler, url: str, timeout: timedelta, **kwargs: Any) -> Iterator[Meeting]:
    """The handler of `env://`."""
    path = os.environ.get("PHALANX_STORE")
    if path and "RANK" in os.environ and "WORLD_SIZE" in os.environ and "?" not in url:
        yield _from_agent(path)
    elif "RANK" not in os.environ and "?" not in url and (launch := mpi_launch(os.environ)) is not None:
        if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
            yield from original(f"{url}?rank={launch.rank}&world_size={launch.world_size}", timeout, **kwargs)
        else:
            yield _from_mpi(launch, timeout)
    else:
        yield from original(url, timeout, **kwargs)
    raise RuntimeError("env:// cannot rendezvous again; destroy the group and initialise anew")


def agent_address() -> str:
    """Where the agent of `phalanx run` looks on while groups work; empty without one."""
    return os.environ.get("PHALANX_AGENT", "")


# Each init_process_group of a process meets under keys of its own: the store outlives the group.
_generation = 0
_kept: list[int] = []


def _next_prefix() -> str:
    global _generation
    _generation += 1
    return f"init-{_generation}"


def _from_agent(path: str) -> Meeting:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = FileStore(path, size)
    return PrefixStore(f"start-{attempt}/{_next_prefix()}", store), rank, size


def _from_mpi(launch: Launch, timeout: timedelta) -> Meeting:
    if launch.local_size not in (0, launch.world_size):
        raise PhalanxError(
            f"init_process_group under {launch.launcher}: {launch.local_size} of {launch.world_size} ranks are on this "
            "host, and the ranks of several hosts need an address to meet at.\n"
            "Set MASTER_ADDR to the first host's name and MASTER_PORT to a free port (mpiexec -x or -genv)."
        )
    deadline = Deadline.after(timeout)
    prefix = _next_prefix()
    token = _mpi_token(prefix)
    if launch.rank == 0:
        with memory("phalanx-store", 0) as fd, Counter(token) as counter:
            _kept.append(os.dup(fd))
            try:
                counter.serve(range(1, launch.world_size), [fd], deadline, lambda missing: None)
            except DeadlineError as error:
                raise _missing(launch, error) from None
    else:
        _kept.extend(fetch(token, launch.rank, 1, deadline, wait_for_leader=True))
    store = FileStore(f"/proc/self/fd/{_kept[-1]}", launch.world_size)
    return PrefixStore(prefix, store), launch.rank, launch.world_size


def _mpi_token(prefix: str) -> str:
    """A name that the ranks of one mpiexec share: the process that started them, when, and the job's name."""
    parent = os.getppid()
    job = os.environ.get("PMIX_NAMESPACE", "")
    text = f"{os.getuid()}/{parent}/{start_ticks(parent)}/{job}/{prefix}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _missing(launch: Launch, error: DeadlineError) -> DeadlineError:
    return DeadlineError(
        f"init_process_group under {launch.launcher}: {error}.\nStart the ranks directly under mpiexec, without a "
        "shell in between, or set MASTER_ADDR and MASTER_PORT.",
        missing=error.missing,
    )
