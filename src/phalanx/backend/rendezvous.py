"""`env://` where torch's own would fail or open a port: under `phalanx run`, and under `mpiexec`.

Both give every rank of one host the same `FileStore` on memory without a name. Under `phalanx run` the agent owns that
memory and says where (PHALANX_STORE). Under `mpiexec` on one host rank 0 makes it and the others fetch it, by a name
that follows from the MPI job; on several hosts rank 0 opens a `TCPStore` and tells its address through MPI. Everything
else is left to torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch._C._distributed_c10d import FileStore, TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from phalanx.arena.handover import Counter, fetch
from phalanx.arena.nameless import memory
from phalanx.arena.observer import fetch_store
from phalanx.arena.watch import start_ticks
from phalanx.backend import unreachable
from phalanx.backend.addresses import own_addresses, reachable
from phalanx.backend.start import launched
from phalanx.backend.unreachable import explained
from phalanx.deadline import Deadline
from phalanx.engines.mpi import Launcher, start, why_not
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


def launcher() -> Launcher | None:
    """Who started this process, as far as MPI is concerned; None if nobody says so."""
    launch = mpi_launch(os.environ)
    if launch is not None:
        return Launcher(launch.launcher, launch.world_size, is_mpi=True)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        name = "phalanx run" if "PHALANX_STORE" in os.environ else "another launcher than mpiexec"
        return Launcher(name, int(os.environ["WORLD_SIZE"]), is_mpi=False)
    return None


def launched_rendezvous(original: Handler, url: str, timeout: timedelta, **kwargs: Any) -> Iterator[Meeting]:
    """The handler of `env://` in a rank of `phalanx run`, whichever backend it asks for."""
    path = os.environ.get("PHALANX_STORE")
    if path and "RANK" in os.environ and "WORLD_SIZE" in os.environ and "?" not in url:
        yield _from_agent(path)
        raise RuntimeError(_NOT_AGAIN)
    yield from original(url, timeout=timeout, **kwargs)


def env_rendezvous(original: Handler, url: str, timeout: timedelta, **kwargs: Any) -> Iterator[Meeting]:
    """The handler of `env://` for our backend."""
    if "RANK" not in os.environ and "?" not in url and (launch := mpi_launch(os.environ)) is not None:
        if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
            yield from address_rendezvous(
                original, f"{url}?rank={launch.rank}&world_size={launch.world_size}", timeout, **kwargs
            )
        else:
            yield _from_mpi(launch, Deadline.after(timeout))
    else:
        yield from address_rendezvous(original, url, timeout, **kwargs)
    raise RuntimeError(_NOT_AGAIN)


_NOT_AGAIN = "env:// cannot rendezvous again; destroy the group and initialise anew"


def address_rendezvous(original: Handler, url: str, timeout: timedelta, **kwargs: Any) -> Iterator[Meeting]:
    """torch's handler of `tcp://`, or of `env://` with an address: its errors say who waited where."""
    meetings = original(url, timeout=timeout, **kwargs)
    # Not around a `yield`: whoever forgets the iterator ends it at the interpreter's exit, when modules are empty.
    with launched(url), explained(_place(url, timeout)):
        meeting = next(meetings)
    yield meeting
    yield from meetings


def _place(url: str, timeout: timedelta) -> unreachable.Meeting:
    """What the URL says of the meeting, or else the environment; torch has yet to find out what is wrong with it."""
    parts = urlsplit(url)
    asked = {name: values[0] for name, values in parse_qs(parts.query).items()}

    def number(name: str, variable: str) -> int:
        text = asked.get(name, os.environ.get(variable, ""))
        return int(text) if text.isdigit() else -1

    tcp = parts.scheme == "tcp"
    host = parts.hostname if tcp else os.environ.get("MASTER_ADDR")
    port = parts.netloc.rpartition(":")[2] if tcp else os.environ.get("MASTER_PORT", "")
    return unreachable.Meeting(
        host or "",
        int(port) if port.isdigit() else 0,
        number("rank", "RANK"),
        number("world_size", "WORLD_SIZE"),
        timeout,
    )


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
    store = FileStore(path if _is_nameless(path) else _store_of_agent(path), size)
    return PrefixStore(f"start-{attempt}/{_next_prefix()}", store), rank, size


def _is_nameless(path: str) -> bool:
    """Whether the agent's file is what this path leads to: in another pid namespace the number is somebody else's."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and status.st_uid == os.getuid()


def _store_of_agent(path: str) -> str:
    """The store from the hands of the agent, for a rank that does not see the agent's process."""
    fd = fetch_store(agent_address())
    if fd is None:
        raise PhalanxError(
            f"init_process_group under phalanx run: the job's store, {path}, cannot be opened, and the agent does not "
            "hand it over.\nThis rank is in another pid namespace (a container, unshare) and another network namespace "
            "than `phalanx run`: start `phalanx run` inside, or let the container use the host's network."
        )
    _kept.append(fd)
    return f"/proc/self/fd/{fd}"


def mpi_rendezvous(deadline: Deadline) -> Meeting | None:
    """Where the ranks of an `mpiexec` meet; None in a process that none has started."""
    launch = mpi_launch(os.environ)
    return None if launch is None else _from_mpi(launch, deadline)


def _from_mpi(launch: Launch, deadline: Deadline) -> Meeting:
    if launch.local_size not in (0, launch.world_size):
        return _across_hosts(launch, deadline), launch.rank, launch.world_size
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


def _across_hosts(launch: Launch, deadline: Deadline) -> Any:
    """The store of an MPI job on several hosts: rank 0 keeps it, and says through MPI where it is."""
    here = f"init_process_group under {launch.launcher} on rank {launch.rank}"
    if problem := why_not(launcher()):
        raise PhalanxError(
            f"{here}: {launch.local_size} of {launch.world_size} ranks are on this host, and the ranks of several "
            f"hosts need MPI to meet, or an address.\n{problem}\n"
            "Or set MASTER_ADDR to the first host's name and MASTER_PORT to a free port (mpiexec -x or -genv)."
        )
    return store_through_mpi(here, deadline)


def store_through_mpi(here: str, deadline: Deadline) -> Any:
    """A store for all ranks of MPI_COMM_WORLD, at a free port of rank 0's host. Collective over them.

    Raises:
        DeadlineError: rank 0 did not come.
        PhalanxError: MPI cannot be started, or rank 0 cannot be reached; the message says where it was looked for.
    """
    runtime = start(launcher())
    words = b""
    if runtime.rank == 0:
        addresses = own_addresses()
        # Whoever comes later connects later: nobody waits for all here.
        store = TCPStore(addresses[0], 0, is_master=True, wait_for_workers=False)
        words = json.dumps([addresses, store.port]).encode()
    words = runtime.broadcast(words, here, deadline)
    if runtime.rank == 0:
        return store
    addresses, port = json.loads(words)
    address = reachable(addresses, port, deadline)
    if not address:
        raise PhalanxError(
            f"{here}: rank 0 keeps the job's store at port {port} of {', '.join(addresses)}, and none answers.\n"
            "Check that the hosts can reach each other (firewall), or set MASTER_ADDR and MASTER_PORT."
        )
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=min(deadline.left_s + 1.0, 1e6)))


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
