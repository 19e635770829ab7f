"""Handle `env://` under `phalanx run`, `mpiexec` and Slurm's `srun`, where torch's handler fails or opens a port.

In all three cases the ranks of one host use the same `FileStore`, on memory without a name. Under `phalanx run` the
agent owns that memory and says where (PHALANX_STORE). Under `mpiexec` and `srun` on one host rank 0 makes it and the
others fetch it, by a name that follows from the job; on several hosts rank 0 opens a `TCPStore`, and tells its address
through MPI, or has one that follows from Slurm's job. Everything else is left to torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import multiprocessing
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist
from torch.distributed import FileStore, HashStore, TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from phalanx._base import host_addresses
from phalanx._base.deadline import Deadline
from phalanx._base.ipc import private
from phalanx._base.ipc.local_listener import LocalAddress
from phalanx._base.processes import read_start_ticks
from phalanx._comm.backend import store_errors
from phalanx._comm.backend.start import launched
from phalanx._comm.backend.store_errors import explained
from phalanx._comm.backend.tcp_store import note_served, open_store
from phalanx._comm.diagnostics.observer import fetch_store
from phalanx._comm.engines.mpi import Launcher, start, why_not
from phalanx._comm.rendezvous.agent_file import LostHost, read_lost, read_store
from phalanx._comm.rendezvous.launchers import (
    COORDINATOR,
    LaunchedProcess,
    find_agents_store,
    find_incomplete_environment,
    find_launch,
    mpi_launch,
)
from phalanx._comm.rendezvous.slurm_address import find_address
from phalanx._comm.symmetric_memory.fd_server import FdServer, receive_fds
from phalanx._comm.symmetric_memory.memfd import memory
from phalanx.errors import DeadlineError, PhalanxError

if TYPE_CHECKING:
    from phalanx._comm.control.key import Key


StoreAndRank = tuple[Any, int, int]
Handler = Callable[..., Iterator[StoreAndRank]]


def launcher() -> Launcher | None:
    """Return the launcher that started this process, as far as MPI is concerned; None if nothing says so."""
    launch = mpi_launch(os.environ)
    if launch is not None:
        return Launcher(launch.launcher, launch.world_size, is_mpi=True)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        name = "phalanx run" if find_agents_store(os.environ) else "another launcher than mpiexec"
        return Launcher(name, int(os.environ["WORLD_SIZE"]), is_mpi=False)
    return None


def launched_rendezvous(original: Handler, url: str, timeout: timedelta, **kwargs: Any) -> Iterator[StoreAndRank]:
    """Yield the handler of `env://` in a rank of `phalanx run`, whichever backend it asks for."""
    path = find_agents_store(os.environ)
    if path and "?" not in url:
        yield _open_at_agent(path)
        raise RuntimeError(_NOT_AGAIN)
    yield from original(url, timeout=timeout, **kwargs)


def env_rendezvous(original: Handler, url: str, timeout: timedelta, **kwargs: Any) -> Iterator[StoreAndRank]:
    """Yield the handler of `env://` for our backend."""
    if find_agents_store(os.environ) and "?" not in url:
        yield from launched_rendezvous(original, url, timeout, **kwargs)  # the agent keeps the store: no port is opened
        return
    launch = find_launch(os.environ) if "RANK" not in os.environ and "?" not in url else None
    if launch is None:
        yield from address_rendezvous(original, url, timeout, **kwargs)
    elif "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        _check_world_size(launch, os.environ)
        url = f"{url}?rank={launch.rank}&world_size={launch.world_size}"
        yield from address_rendezvous(original, url, timeout, **kwargs)
    else:
        yield join(launch, Deadline.after(timeout))
    raise RuntimeError(_NOT_AGAIN)


_RANKS_PER_GPU = "PHALANX_RANKS_PER_GPU"
_NOT_AGAIN = "env:// cannot rendezvous again; destroy the group and initialise anew"


def address_rendezvous(original: Handler, url: str, timeout: timedelta, **kwargs: Any) -> Iterator[StoreAndRank]:
    """Yield the handler of `tcp://`, or of `env://` with an address: its errors say which rank waited where.

    torch's `original` has rank 0 wait until as many processes have come as it believes in, and so hear too late of
    those that believe something else. Here all go on to the bootstrap of the group, which compares.
    """
    place = _place(url, timeout)
    if place.host and place.port and place.rank >= 0 and place.world_size >= 1:
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps the store
        libuv = parse_qs(urlsplit(url).query).get("use_libuv", [os.environ.get("USE_LIBUV", "1")])[0] == "1"
        store = open_store(place, serve=place.rank == 0 and not is_agents, libuv=libuv)
        if is_agents:  # it outlives an attempt; torch's own handler keeps them apart in the same way
            store = PrefixStore(f"/worker/attempt_{attempt()}", store)
        yield store, place.rank, place.world_size
        raise RuntimeError(_NOT_AGAIN)
    # torch says what is wrong with it. Not around a `yield`: whoever forgets the iterator ends it at the interpreter's
    # exit, when modules are empty.
    addresses = original(url, timeout=timeout, **kwargs)
    with launched(url), explained(place):
        address = next(addresses)
    yield address
    yield from addresses


def _place(url: str, timeout: timedelta) -> store_errors.StoreAddress:
    """Return what the URL says of the rendezvous, or else the environment; torch has yet to find out what is wrong."""
    parts = urlsplit(url)
    asked = {name: values[0] for name, values in parse_qs(parts.query).items()}

    def number(name: str, variable: str) -> int:
        text = asked.get(name, os.environ.get(variable, ""))
        return int(text) if text.isdigit() else -1

    tcp = parts.scheme == "tcp"
    host = parts.hostname if tcp else os.environ.get("MASTER_ADDR")
    port = parts.netloc.rpartition(":")[2] if tcp else os.environ.get("MASTER_PORT", "")
    return store_errors.StoreAddress(
        host or "",
        int(port) if port.isdigit() else 0,
        number("rank", "RANK"),
        number("world_size", "WORLD_SIZE"),
        timeout,
    )


def attempt() -> str:
    """Return the number of the launcher's start of this script; "0" is the first, and that of no launcher."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"


def agent_address() -> str:
    """Return where the agent of `phalanx run` looks on while groups work; "" in a process that is none of its ranks."""
    return os.environ.get("PHALANX_AGENT", "") if find_agents_store(os.environ) else ""


def find_lost_host() -> LostHost | None:
    """Return what the agent of this host has told of a lost host, in a job on several; costs a system call."""
    return read_lost(_agent_file) if _agent_file >= 0 else None


def agents_key() -> Key | None:
    """Return the job's key, in a rank of `phalanx run` on several hosts; None elsewhere."""
    from phalanx._comm.control.key import Key  # it is not imported at the top, since a job on one host needs none

    key = read_store(_agent_file)[1] if _agent_file >= 0 else ""
    return Key.parse(key) if key else None


def own_address() -> str:
    """Return this host's address in a job on several, which the agents have tried; empty where nobody has."""
    return os.environ.get("PHALANX_ADDRESS", "") if find_agents_store(os.environ) else ""


# -- generations of an elastic job: the ranks that form its group, until some are lost or taken in ---------------------

_rehearsal_over = False


def generation() -> int:
    """Return the generation that this process belongs to: 0 in a job that has lost nobody, or that is not elastic."""
    text = os.environ.get("PHALANX_GENERATION", "") if find_agents_store(os.environ) else ""
    return int(text) if text.isdecimal() else 0


def is_rehearsing() -> bool:
    """Return whether this process replaces a rank, and has not met the others: its groups are of itself alone."""
    return not _rehearsal_over and generation() > 0


def enter_generation(environment: Mapping[str, str]) -> StoreAndRank:
    """Become the rank of a generation that `environment` describes; return where its ranks meet.

    Without variables it is the generation that this process was started for.
    """
    os.environ.update(environment)
    path = find_agents_store(os.environ)
    if not path:
        raise PhalanxError(f"the launcher described no place to meet in generation {generation()}. Please report this.")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _open_coordinator(path) if path.startswith(COORDINATOR) else FileStore(_find_file(path), size)
    return PrefixStore(f"generation-{attempt()}-{generation()}", store), rank, size  # hosts have one for all attempts


def end_rehearsal() -> None:
    """Let groups be real from now on."""
    global _rehearsal_over
    _rehearsal_over = True


# Each init_process_group of a process meets under keys of its own: the store outlives the group.
_generation = 0
_open_files: list[int] = []
_agent_file = -1  # in a job on several hosts: what the agent tells
_open_stores: list[Any] = []  # stores written in Python: torch's references to them do not keep Python's half


def _next_prefix() -> str:
    global _generation
    _generation += 1
    return f"init-{_generation}"


def _open_at_agent(path: str) -> StoreAndRank:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _open_coordinator(path) if path.startswith(COORDINATOR) else FileStore(_find_file(path), size)
    return PrefixStore(f"start-{attempt()}/{_next_prefix()}", store), rank, size


def _find_file(path: str) -> str:
    return path if _is_memfd(path) else _fetch_from_agent(path)


def _open_coordinator(path: str) -> Any:
    """Return the store of a job on several hosts."""
    from phalanx._comm.backend.coordination_store import (
        CoordinationStore,  # these are not imported at the top, since a job on one host needs none of them
    )
    from phalanx._comm.control.key import Key

    global _agent_file
    file = os.open(_find_file(path.removeprefix(COORDINATOR)), os.O_RDONLY | os.O_CLOEXEC)
    if _agent_file < 0:
        _agent_file = file
    else:  # in the place of the one before, which another thread may be reading
        os.dup2(file, _agent_file, inheritable=False)
        os.close(file)
    address, key = read_store(_agent_file)
    known = next((store for store in _open_stores if store.leads_to(address)), None)
    if known is not None:
        return known
    store = CoordinationStore(address, Key.parse(key) if key else None)
    _open_stores.append(store)
    return store


def _is_memfd(path: str) -> bool:
    """Return whether this path leads to the agent's file: in another pid namespace the number is another's."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and status.st_uid == os.getuid()


def _fetch_from_agent(path: str) -> str:
    """Return the store that the agent hands over, for a rank that does not see the agent's process."""
    fd = fetch_store(agent_address())
    if fd is None:
        raise PhalanxError(
            f"init_process_group under phalanx run: the job's store, {path}, cannot be opened, and the agent does not "
            "hand it over.\nThis rank is in another pid namespace (a container, unshare) and another network namespace "
            "than `phalanx run`: start `phalanx run` inside, or let the container use the host's network."
        )
    _open_files.append(fd)
    return f"/proc/self/fd/{fd}"


def mpi_rendezvous(timeout: timedelta) -> StoreAndRank:
    """Return where the ranks of backend "mpi" meet, as `env://` says; a process that no launcher started is alone."""
    is_spawned = multiprocessing.parent_process() is not None
    has_rank = "RANK" in os.environ or find_launch(os.environ) is not None
    if not has_rank and not find_incomplete_environment(os.environ, is_spawned=is_spawned):
        return HashStore(), 0, 1
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore("default_pg", store), rank, world_size


def join(launch: LaunchedProcess, deadline: Deadline) -> StoreAndRank:
    """Return where the processes of this launch meet, without an address from the user.

    Raises:
        ValueError: WORLD_SIZE says something else than the launcher.
        DeadlineError: some rank never came.
        PhalanxError: they have no way to find each other; the message says what to set.
    """
    _check_world_size(launch, os.environ)
    if launch.local_size in (0, launch.world_size):
        prefix = _next_prefix()
        return PrefixStore(prefix, _open_on_one_host(launch, prefix, deadline)), launch.rank, launch.world_size
    store = (
        _open_at_first_host(launch, deadline) if launch.launcher == "Slurm" else _open_across_hosts(launch, deadline)
    )
    return store, launch.rank, launch.world_size


def join_siblings(rank: int, world_size: int, secret: bytes, deadline: Deadline) -> StoreAndRank:
    """Return where the processes meet that one process has started with `multiprocessing`, which share its `secret`.

    Raises:
        DeadlineError: some rank never came.
    """
    prefix = _next_prefix()
    # All descendants of a process have its secret, so the parent is part of the name: two trials of a sweep may each
    # spawn ranks. The secret itself goes nowhere: it is the key of every connection of multiprocessing.
    parent = multiprocessing.parent_process()
    job = f"{prefix} {parent.pid if parent is not None else 0}"
    name, token = (hmac.new(secret, f"phalanx {word} {job}".encode(), "sha256").hexdigest() for word in "nt")
    launch = LaunchedProcess("multiprocessing", rank, world_size, rank, world_size)
    address = LocalAddress(token[:32], str(private.folder() / f"spawn-{name[:32]}"))
    return PrefixStore(prefix, _open_at_rank_0(launch, address, deadline)), rank, world_size


def _check_world_size(launch: LaunchedProcess, environ: Mapping[str, str]) -> None:
    size = environ.get("WORLD_SIZE", "")
    if size not in ("", str(launch.world_size)):
        raise ValueError(
            f"init_process_group: {launch.launcher} started {launch.world_size} processes, and WORLD_SIZE={size} in "
            "the environment says otherwise.\nUnset WORLD_SIZE, or set RANK for each process as well."
        )


def _open_on_one_host(launch: LaunchedProcess, prefix: str, deadline: Deadline) -> Any:
    """Return the store of a job on one host: in rank 0's memory, found by the job's name in the user's own folder.

    The name is no secret, and need not be one: nobody else can go there, or take the name first.
    """
    parent = os.getppid()
    job = launch.job if launch.launcher == "Slurm" else f"{launch.job}/{parent}/{read_start_ticks(parent)}"
    digest = hashlib.sha256(f"{launch.launcher}/{job}/{prefix}".encode()).hexdigest()
    return _open_at_rank_0(launch, LocalAddress(digest[:32], str(private.folder() / f"job-{digest[:32]}")), deadline)


def _open_at_rank_0(launch: LaunchedProcess, address: LocalAddress, deadline: Deadline) -> Any:
    if not os.path.isdir("/proc/self/fd"):  # torch would look for the file for five minutes
        raise PhalanxError(
            f"init_process_group under {launch.launcher} on rank {launch.rank}: the job's store is in memory without a "
            "name, to which only /proc leads, and there is no /proc here.\n"
            "Mount /proc, or set MASTER_ADDR and MASTER_PORT."
        )
    if launch.rank == 0:
        try:
            server = FdServer(address.token, at=address.path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise PhalanxError(
                f"init_process_group under {launch.launcher} on rank 0 of {launch.world_size}: another rank 0 of the "
                "same launch is waiting for its ranks here, of a job that was started beside this one.\n"
                "Start one after the other has begun, or give each an address: MASTER_ADDR and MASTER_PORT, or "
                "init_method='tcp://127.0.0.1:<a free port>'."
            ) from None
        with memory("phalanx-store", 0) as fd, server:
            _open_files.append(os.dup(fd))
            try:
                server.serve(range(1, launch.world_size), [fd], deadline, lambda missing: None)
            except DeadlineError as error:
                raise _explain_missing(launch, error) from None
    else:
        try:
            _open_files.extend(receive_fds(address, launch.rank, 1, deadline, wait_for_leader=True))
        except DeadlineError:
            raise _explain_missing(launch, DeadlineError("rank 0 did not come", missing=(0,))) from None
    return FileStore(f"/proc/self/fd/{_open_files[-1]}", launch.world_size)


def _open_at_first_host(launch: LaunchedProcess, deadline: Deadline) -> Any:
    """Return the store of a job of Slurm on several hosts: a port of the first host from the job's number."""
    host = os.environ.get("MASTER_ADDR") or find_address(launch.first_host)
    port = int(os.environ.get("MASTER_PORT", launch.port))
    here = f"init_process_group under Slurm on rank {launch.rank} of {launch.world_size}"
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise PhalanxError(
            f"{here}: the ranks are on several hosts, and the name of the first, {host!r}, leads nowhere from here "
            f"({error.strerror}).\nSet MASTER_ADDR to an address of that host, for all ranks (and MASTER_PORT, if port "
            f"{port} is not free there): srun --export=ALL,MASTER_ADDR=…"
        ) from None
    place = store_errors.StoreAddress(
        host, port, launch.rank, launch.world_size, timedelta(seconds=min(deadline.left_s + 1.0, 1e6))
    )
    return open_store(place, serve=launch.rank == 0)


def _open_across_hosts(launch: LaunchedProcess, deadline: Deadline) -> Any:
    """Return the store of an MPI job on several hosts: rank 0 keeps it, and says through MPI where it is.

    Raises:
        DeadlineError: rank 0 did not come.
        PhalanxError: MPI cannot be started, or rank 0 cannot be reached; the message says where it was looked for.
    """
    here = f"init_process_group under {launch.launcher} on rank {launch.rank}"
    if problem := why_not(launcher()):
        raise PhalanxError(
            f"{here}: {launch.local_size} of {launch.world_size} ranks are on this host, and the ranks of several "
            f"hosts need MPI to meet, or an address.\n{problem}\n"
            "Or set MASTER_ADDR to the first host's name and MASTER_PORT to a free port (mpiexec -x or -genv)."
        )
    runtime = start(launcher())
    words = b""
    if runtime.rank == 0:
        addresses = own_addresses()
        # Whoever comes later connects later: nobody waits for all here.
        store = TCPStore(addresses[0], 0, is_master=True, wait_for_workers=False)
        note_served(store)
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


def _explain_missing(launch: LaunchedProcess, error: DeadlineError) -> DeadlineError:
    advice = {
        "Slurm": "Check that each task reached init_process_group; the log of a missing rank comes first.",
        "multiprocessing": "Start all ranks from one process, on one host, or give init_method= (tcp://host:port).",
    }
    mpi = "Start the ranks directly under mpiexec, without a shell in between, or set MASTER_ADDR and MASTER_PORT."
    return DeadlineError(
        f"init_process_group under {launch.launcher} on rank {launch.rank}: {error}.\n"
        f"{advice.get(launch.launcher, mpi)}",
        missing=error.missing,
    )


def ranks_per_gpu() -> int:
    """Return how many ranks the launcher has put on a GPU, as `phalanx run --ranks-per-gpu` does."""
    text = os.environ.get(_RANKS_PER_GPU, "")
    return max(1, int(text)) if text.isdecimal() else 1


def ranks_share_gpus() -> bool:
    """Return whether the launcher has put several ranks on a GPU."""
    return ranks_per_gpu() > 1


_TRY_S = 2.0
_PAUSE_S = 0.1


def own_addresses() -> list[str]:
    """Return this host's IPv4 addresses, never none: those that lead far come first, the loopback's last."""
    found = [own.address for own in host_addresses.own_addresses() if ":" not in own.address]
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    found.append("127.0.0.1")
    return sorted(dict.fromkeys(found), key=lambda address: address.startswith("127."))


def reachable(addresses: Sequence[str], port: int, deadline: Deadline) -> str:
    """Return the first of `addresses` where `port` takes a connection, tried in turn until time is up; else ""."""
    while True:
        for address in addresses:
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_TRY_S):
                return address
            if deadline.passed:
                return ""
        time.sleep(_PAUSE_S)
