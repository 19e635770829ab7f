"""Find the rendezvous of a job's nodes, and the job's key, without options from the user.

all on one host      no port and no key: node 0 sends the path of its coordinator to the others, through a folder that
                     only this user may enter
on several hosts     a port of the first host: the first free one of a few ports derived from the job's name. A node
                     that finds another job there tries the next port. The key is the user's; node 0 makes a missing key
… under mpiexec      mpiexec does not name the first host, so MPI broadcasts that host's addresses, and a key
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from phalanx._base.deadline import Deadline
from phalanx._base.host_addresses import own_addresses
from phalanx._base.ipc import private
from phalanx._base.ipc.local_listener import LocalAddress
from phalanx._base.processes import read_start_ticks
from phalanx._comm.rendezvous.slurm_address import find_address
from phalanx._comm.symmetric_memory.fd_server import FdServer, receive_fds
from phalanx._comm.symmetric_memory.memfd import memory
from phalanx._job.coordinator.rendezvous import Rendezvous, join_endpoint
from phalanx._job.schedulers.allocation import Allocation
from phalanx._job.schedulers.mpi_broadcast import broadcast
from phalanx.errors import AuthenticationError, DeadlineError, LaunchError, PhalanxError

_MAX_PATH_BYTES = 4096


def find_rendezvous(
    found: Allocation, key_file: str | None, environ: Mapping[str, str], own: Rendezvous
) -> tuple[Rendezvous, str]:
    """Return the rendezvous of node `found`, which completes `own`, and the job's name.

    Every node except the first may wait for the first node, for up to `own.join_timeout_s`.

    Raises:
        LaunchError: there is no key, or the first host cannot be found; the message says what to do.
    """
    deadline = Deadline.after(own.join_timeout_s)
    try:
        if found.is_on_one_host and not found.port:
            return _share_local_path(found, own, deadline), found.job
        if found.needs_mpi_broadcast:
            return _broadcast_endpoints(found, own, environ, deadline)
        own = replace(own, key=_find_key(found, key_file, environ))
        host = find_address(found.first_host) if found.scheduler == "Slurm" else found.first_host
        return _at(own, [join_endpoint(host, port) for port in found.ports]), found.job
    except (AuthenticationError, DeadlineError) as error:
        raise LaunchError(f"phalanx run: {found.describe()}: {error}") from error


def _at(own: Rendezvous, endpoints: Sequence[str]) -> Rendezvous:
    return replace(own, endpoint=endpoints[0], more_endpoints=tuple(endpoints[1:]))


def _share_local_path(found: Allocation, own: Rendezvous, deadline: Deadline) -> Rendezvous:
    if sys.platform != "linux":
        raise LaunchError(
            f"phalanx run: {found.describe()}: several nodes on one host find each other on Linux only. Start "
            "`phalanx run` once, with --nproc-per-node.",
            exit_code=2,
        )
    digest = hashlib.sha256(f"{found.scheduler}/{found.job}".encode()).hexdigest()
    address = LocalAddress(digest[:32], str(private.folder() / f"agents-{digest[:32]}"))
    if found.node == 0:
        return replace(own, endpoint="", is_local=True, announce=_serve_path(address, found.num_nodes, deadline))
    (fd,) = receive_fds(address, found.node, 1, deadline, wait_for_leader=True)
    try:
        return replace(own, endpoint=os.pread(fd, _MAX_PATH_BYTES, 0).decode(), is_local=True)
    finally:
        os.close(fd)


def _serve_path(address: LocalAddress, num_nodes: int, deadline: Deadline) -> Callable[[str], None]:
    """Return a function that sends the other nodes a path, in a thread, so that the agent can handle Ctrl-C."""

    def serve(path: bytes) -> None:
        with memory("phalanx-coordinator", len(path)) as fd, FdServer(address.token, at=address.path) as server:
            os.pwrite(fd, path, 0)
            with contextlib.suppress(DeadlineError):  # the coordinator reports who is missing
                server.serve(range(1, num_nodes), [fd], deadline, lambda missing: None)

    def announce(path: str) -> None:
        threading.Thread(target=serve, args=(path.encode(),), name="phalanx-announce", daemon=True).start()

    return announce


def _broadcast_endpoints(
    found: Allocation, own: Rendezvous, environ: Mapping[str, str], deadline: Deadline
) -> tuple[Rendezvous, str]:
    from phalanx._comm.control.key import Key

    words = b""
    with contextlib.ExitStack() as reserved:  # so that MPI's own sockets do not take the port meanwhile
        if found.node == 0:
            hosts = [address.address for address in own_addresses() if not address.is_loopback]
            port = found.port or reserved.enter_context(_free_port())
            job = f"mpiexec-{socket.gethostname()}-{os.getpid()}-{read_start_ticks(os.getpid())}"
            endpoints = [join_endpoint(host, port) for host in ([found.first_host] if found.first_host else hosts)]
            words = json.dumps({"endpoints": endpoints, "port": port, "key": str(Key.generate()), "job": job}).encode()
        try:
            received = json.loads(broadcast(words, environ, deadline))
        except PhalanxError as error:
            raise LaunchError(
                f"phalanx run: {found.describe()}: the processes are on several hosts, the first of which is unknown, "
                f"and MPI could not be asked: {error}\nInstall mpi4py, or set MASTER_ADDR for all processes to an "
                "address of the first host, and MASTER_PORT to a free port there (mpiexec -x or -genv).",
                exit_code=2,
            ) from None
    own = replace(own, key=received["key"])
    # The first host listens at all its addresses: it cannot know which one another host can reach.
    return _at(own, [f":{received['port']}"] if found.node == 0 else received["endpoints"]), received["job"]


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """Yield a free port, which no other process can bind inside the context."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        yield sock.getsockname()[1]


def _find_key(found: Allocation, key_file: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the user's key; None if it is missing, so that node 0 creates it at the start of the job.

    Raises:
        LaunchError: the key is missing, and pods share no folder in which node 0 could create it.
    """
    from phalanx._comm.control.key_file import find_key

    key = find_key(key_file, environ)
    if key is not None:
        return str(key)
    if found.scheduler.startswith("Kube"):
        raise LaunchError(
            f"phalanx run: {found.describe()}: pods share no folder, and there is no key in PHALANX_KEY or "
            "PHALANX_KEY_FILE. Make one (phalanx key), put it into a Secret, and have the pods' PHALANX_KEY come from "
            "there: `phalanx manifest kubernetes` writes a file that does.",
            exit_code=2,
        )
    return None
