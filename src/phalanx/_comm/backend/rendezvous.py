"""Handle `env://` under `phalanx run`, `mpiexec` and Slurm's `srun`, where torch's handler fails or opens a port.

In a job on one host, the ranks share a `FileStore` in anonymous memory. Under `phalanx run` the agent owns that memory,
and PHALANX_STORE is its path. Under `mpiexec` and `srun` rank 0 creates the memory, and the others fetch it by a name
derived from the job. In a job on several hosts, `phalanx run` offers its coordinator as the store; otherwise rank 0
opens a `TCPStore`, whose address MPI broadcasts, or Slurm's job determines. torch handles everything else.
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
from dataclasses import replace
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
from phalanx._comm.backend.start import launched
from phalanx._comm.backend.tcp_store import StoreAddress, explain_store_errors, note_served, open_store
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
    """Return the launcher that started this process, for starting MPI; None if unknown."""
    launch = mpi_launch(os.environ)
    if launch is not None:
        return Launcher(launch.launcher, launch.world_size, is_mpi=True)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        name = "phalanx run" if find_agents_store(os.environ) else "another launcher than mpiexec"
        return Launcher(name, int(os.environ["WORLD_SIZE"]), is_mpi=False)
    return None


def launched_rendezvous(original: Handler, url: str, timeout: timedelta, **kwargs: Any) -> Iterator[StoreAndRank]:
    """Yield the store, rank and world size of `env://` in a rank of `phalanx run`, for any backend."""
    path = find_agents_store(os.environ)
    if path and "?" not in url:
        yield _open_at_agent(path)
        raise RuntimeError(_NOT_AGAIN)
    yield from original(url, timeout=timeout, **kwargs)


def env_rendezvous(original: Handler, url: str, timeout: timedelta, **kwargs: Any) -> Iterator[StoreAndRank]:
    """Yield the store, rank and world size of `env://`, for our backend."""
    if find_agents_store(os.environ) and "?" not in url:
        yield from launched_rendezvous(original, url, timeout, **kwargs)  # the agent has the store: no port is opened
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
_NOT_AGAIN = "env:// cannot rendezvous again; destroy the group, then initialize a new one"


def address_rendezvous(original: Handler, url: str, timeout: timedelta, **kwargs: Any) -> Iterator[StoreAndRank]:
    """Yield the store, rank and world size of `tcp://`, or of `env://` with an address; errors name rank and address.

    In torch's `original`, rank 0 waits for as many processes as its own world size, so it detects too late that another
    rank has a different world size. Here all ranks continue to the group's bootstrap, which compares the world sizes.
    """
    place = _place(url, timeout)
    if _is_complete(place):
        yield _open_at(place, url), place.rank, place.world_size
        raise RuntimeError(_NOT_AGAIN)
    # torch reports what is missing in `place`. No `yield` is inside the `with`: an iterator that was not exhausted is
    # closed at the interpreter's exit, when modules are already cleared.
    addresses = original(url, timeout=timeout, **kwargs)
    with launched(url), explain_store_errors(place):
        address = next(addresses)
    yield address
    yield from addresses


def open_at_address(url: str, timeout: timedelta, function: str) -> Any | None:
    """Return the store at the address of `tcp://`, or of `env://` with an address; None for other URLs.

    Raises:
        DistNetworkError: as `open_store`; the message names `function`.
    """
    place = replace(_place(url, timeout), function=function)
    return _open_at(place, url) if urlsplit(url).scheme in ("tcp", "env") and _is_complete(place) else None


def _is_complete(place: StoreAddress) -> bool:
    return bool(place.host and place.port) and place.rank >= 0 and place.world_size >= 1


def _open_at(place: StoreAddress, url: str) -> Any:
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves the store
    libuv = parse_qs(urlsplit(url).query).get("use_libuv", [os.environ.get("USE_LIBUV", "1")])[0] == "1"
    store = open_store(place, serve=place.rank == 0 and not is_agents, libuv=libuv)
    # torchrun's store outlives an attempt, so each attempt has a prefix, the same as in torch's own handler
    return PrefixStore(f"/worker/attempt_{attempt()}", store) if is_agents else store


def _place(url: str, timeout: timedelta) -> StoreAddress:
    """Return the address, rank and world size in the URL, or else in the environment, without checking them."""
    parts = urlsplit(url)
    asked = {name: values[0] for name, values in parse_qs(parts.query).items()}

    def number(name: str, variable: str) -> int:
        text = asked.get(name, os.environ.get(variable, ""))
        return int(text) if text.isdigit() else -1

    tcp = parts.scheme == "tcp"
    host = parts.hostname if tcp else os.environ.get("MASTER_ADDR")
    port = parts.netloc.rpartition(":")[2] if tcp else os.environ.get("MASTER_PORT", "")
    return StoreAddress(
        host or "",
        int(port) if port.isdigit() else 0,
        number("rank", "RANK"),
        number("world_size", "WORLD_SIZE"),
        timeout,
    )


def attempt() -> str:
    """Return how often the launcher has restarted this script; "0" without a launcher."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"


def agent_address() -> str:
    """Return the address of the agent of `phalanx run`; "" in a process that is not one of its ranks."""
    return os.environ.get("PHALANX_AGENT", "") if find_agents_store(os.environ) else ""


def find_lost_host() -> LostHost | None:
    """Return the lost host that this host's agent has reported, in a job on several hosts. Cost: a system call."""
    return read_lost(_agent_file) if _agent_file >= 0 else None


def agents_key() -> Key | None:
    """Return the job's key, in a rank of `phalanx run` on several hosts; None elsewhere."""
    from phalanx._comm.control.key import Key  # imported here, since a job on one host needs no key

    key = read_store(_agent_file)[1] if _agent_file >= 0 else ""
    return Key.parse(key) if key else None


def own_address() -> str:
    """Return this host's address, which the agents have tested, in a job on several hosts; "" in other jobs."""
    return os.environ.get("PHALANX_ADDRESS", "") if find_agents_store(os.environ) else ""


# -- generations of an elastic job: the ranks that form its group, until ranks are lost or join ------------------------

_rehearsal_over = False


def generation() -> int:
    """Return the generation of this process: 0 until a rank is lost, and in a job that is not elastic."""
    text = os.environ.get("PHALANX_GENERATION", "") if find_agents_store(os.environ) else ""
    return int(text) if text.isdecimal() else 0


def is_rehearsing() -> bool:
    """Return whether this process replaces a rank and has not joined the others yet: its groups have one rank."""
    return not _rehearsal_over and generation() > 0


def enter_generation(environment: Mapping[str, str]) -> StoreAndRank:
    """Become the rank that `environment` describes; return the store of its generation, the rank and the world size.

    An empty `environment` means that the launcher started this process for the generation and set its variables.
    """
    os.environ.update(environment)
    path = find_agents_store(os.environ)
    if not path:
        raise PhalanxError(f"the launcher passed no store for generation {generation()}. Please report this.")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _open_coordinator(path) if path.startswith(COORDINATOR) else FileStore(_find_file(path), size)
    # On several hosts all attempts use one store.
    return PrefixStore(f"generation-{attempt()}-{generation()}", store), rank, size


def end_rehearsal() -> None:
    """Create groups with all their ranks from now on."""
    global _rehearsal_over
    _rehearsal_over = True


# Each init_process_group of a process uses its own keys, because the store outlives the group.
_generation = 0
_open_files: list[int] = []
_agent_file = -1  # in a job on several hosts: the agent's file
_open_stores: list[Any] = []  # stores written in Python, whose Python half torch's references do not keep alive


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
    # imported here, since a job on one host needs neither
    from phalanx._comm.backend.coordination_store import CoordinationStore
    from phalanx._comm.control.key import Key

    global _agent_file
    file = os.open(_find_file(path.removeprefix(COORDINATOR)), os.O_RDONLY | os.O_CLOEXEC)
    if _agent_file < 0:
        _agent_file = file
    else:  # replaces the previous file, which another thread may be reading
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
    """Return whether `path` leads to the agent's file; in another pid namespace, it leads to another process's."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and status.st_uid == os.getuid()


def _fetch_from_agent(path: str) -> str:
    """Fetch the store from the agent, for a rank that does not see the agent's process; return its path."""
    fd = fetch_store(agent_address())
    if fd is None:
        raise PhalanxError(
            f"init_process_group under phalanx run: the job's store, {path}, cannot be opened, and the agent does not "
            "send it.\nThis rank shares neither the pid namespace nor the network namespace of `phalanx run` (a "
            "container, unshare): start `phalanx run` inside, or let the container use the host's network."
        )
    _open_files.append(fd)
    return f"/proc/self/fd/{fd}"


def mpi_rendezvous(timeout: timedelta) -> StoreAndRank:
    """Return the store, rank and world size for "mpi", as `env://` does; without a launcher, a job of one rank."""
    is_spawned = multiprocessing.parent_process() is not None
    has_rank = "RANK" in os.environ or find_launch(os.environ) is not None
    if not has_rank and not find_incomplete_environment(os.environ, is_spawned=is_spawned):
        return HashStore(), 0, 1
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore("default_pg", store), rank, world_size


def join(launch: LaunchedProcess, deadline: Deadline) -> StoreAndRank:
    """Return the store, rank and world size of a process of this launch; the user need not set an address.

    Raises:
        ValueError: WORLD_SIZE contradicts the launcher.
        DeadlineError: some rank never joined.
        PhalanxError: the ranks have no way to find each other; the message names the variables to set.
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
    """Return the store, rank and world size of a process of `multiprocessing`, which shares `secret` with its siblings.

    Raises:
        DeadlineError: some rank never joined.
    """
    prefix = _next_prefix()
    # All descendants of a process have its secret, so the parent is part of the name: two trials of a sweep may each
    # spawn ranks. The secret itself is never sent, because it is also the key of multiprocessing's own connections.
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
            f"init_process_group: {launch.launcher} started {launch.world_size} processes, but the environment has "
            f"WORLD_SIZE={size}.\nUnset WORLD_SIZE, or set RANK for each process as well."
        )


def _open_on_one_host(launch: LaunchedProcess, prefix: str, deadline: Deadline) -> Any:
    """Return the store of a job on one host: rank 0's memory, served at a socket in the user's private directory.

    The socket's name need not be secret: no other user can enter the directory, or create the name first.
    """
    parent = os.getppid()
    job = launch.job if launch.launcher == "Slurm" else f"{launch.job}/{parent}/{read_start_ticks(parent)}"
    digest = hashlib.sha256(f"{launch.launcher}/{job}/{prefix}".encode()).hexdigest()
    return _open_at_rank_0(launch, LocalAddress(digest[:32], str(private.folder() / f"job-{digest[:32]}")), deadline)


def _open_at_rank_0(launch: LaunchedProcess, address: LocalAddress, deadline: Deadline) -> Any:
    if not os.path.isdir("/proc/self/fd"):  # torch would search for the file for five minutes
        raise PhalanxError(
            f"init_process_group under {launch.launcher} on rank {launch.rank}: the job's store is in anonymous "
            "memory, which ranks open through /proc, but there is no /proc here.\n"
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
                "same launch is waiting for its ranks on this host: two jobs were started at the same time.\n"
                "Start the second job after the first has formed its group, or give each job its own address: "
                "MASTER_ADDR and MASTER_PORT, or init_method='tcp://127.0.0.1:<a free port>'."
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
            raise _explain_missing(launch, DeadlineError("rank 0 did not join", missing=(0,))) from None
    return FileStore(f"/proc/self/fd/{_open_files[-1]}", launch.world_size)


def _open_at_first_host(launch: LaunchedProcess, deadline: Deadline) -> Any:
    """Return the store of a Slurm job on several hosts: on the first host, at a port derived from the job's id."""
    host = os.environ.get("MASTER_ADDR") or find_address(launch.first_host)
    port = int(os.environ.get("MASTER_PORT", launch.port))
    here = f"init_process_group under Slurm on rank {launch.rank} of {launch.world_size}"
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise PhalanxError(
            f"{here}: the ranks are on several hosts, but the name of the first host, {host!r}, does not resolve here "
            f"({error.strerror}).\nSet MASTER_ADDR to an address of that host, for all ranks (and MASTER_PORT, if port "
            f"{port} is not free there): srun --export=ALL,MASTER_ADDR=…"
        ) from None
    place = StoreAddress(host, port, launch.rank, launch.world_size, timedelta(seconds=min(deadline.left_s + 1.0, 1e6)))
    return open_store(place, serve=launch.rank == 0)


def _open_across_hosts(launch: LaunchedProcess, deadline: Deadline) -> Any:
    """Return the store of an MPI job on several hosts: rank 0 serves it, and broadcasts its address through MPI.

    Raises:
        DeadlineError: rank 0 did not join.
        PhalanxError: MPI cannot be started, or rank 0 cannot be reached; the message has the addresses tried.
    """
    here = f"init_process_group under {launch.launcher} on rank {launch.rank}"
    if problem := why_not(launcher()):
        raise PhalanxError(
            f"{here}: {launch.local_size} of {launch.world_size} ranks are on this host; ranks on several hosts "
            f"find each other through MPI or at an address.\n{problem}\n"
            "Or set MASTER_ADDR to the first host's name and MASTER_PORT to a free port (mpiexec -x or -genv)."
        )
    runtime = start(launcher())
    words = b""
    if runtime.rank == 0:
        addresses = own_addresses()
        # Late ranks connect later: no rank waits for all of them here.
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
            f"{here}: rank 0 serves the job's store at port {port} of {', '.join(addresses)}, but no address answers.\n"
            "Check that the hosts can reach each other (firewall), or set MASTER_ADDR and MASTER_PORT."
        )
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=min(deadline.left_s + 1.0, 1e6)))


def _explain_missing(launch: LaunchedProcess, error: DeadlineError) -> DeadlineError:
    advice = {
        "Slurm": "Check that each task reached init_process_group; read the log of a missing rank first.",
        "multiprocessing": "Start all ranks from one process, on one host, or pass init_method= (tcp://host:port).",
    }
    mpi = "Start the ranks directly under mpiexec, without a shell in between, or set MASTER_ADDR and MASTER_PORT."
    return DeadlineError(
        f"init_process_group under {launch.launcher} on rank {launch.rank}: {error}.\n"
        f"{advice.get(launch.launcher, mpi)}",
        missing=error.missing,
    )


def ranks_per_gpu() -> int:
    """Return how many ranks share a GPU, as set by `phalanx run --ranks-per-gpu`."""
    text = os.environ.get(_RANKS_PER_GPU, "")
    return max(1, int(text)) if text.isdecimal() else 1


def ranks_share_gpus() -> bool:
    """Return whether several ranks share a GPU."""
    return ranks_per_gpu() > 1


_TRY_S = 2.0
_PAUSE_S = 0.1


def own_addresses() -> list[str]:
    """Return this host's IPv4 addresses, at least one: routable ones first, loopback last."""
    found = [own.address for own in host_addresses.own_addresses() if ":" not in own.address]
    with contextlib.suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    found.append("127.0.0.1")
    return sorted(dict.fromkeys(found), key=lambda address: address.startswith("127."))


def reachable(addresses: Sequence[str], port: int, deadline: Deadline) -> str:
    """Return the first of `addresses` that accepts a connection at `port`, tried in turn until time is up; else ""."""
    while True:
        for address in addresses:
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_TRY_S):
                return address
            if deadline.passed:
                return ""
        time.sleep(_PAUSE_S)
