"""Explain that the job's store cannot be reached: which rank waited where, what answers there, and what to do.

torch's own errors are kept, in class and in words; what they leave out is put before them.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError

_PROBE_S = 2.0


@dataclass(frozen=True)
class StoreAddress:
    """The address at which a rank meets the others; -1 stands for a port or a number of ranks that is not known."""

    host: str
    port: int
    rank: int
    world_size: int
    timeout: timedelta


@contextlib.contextmanager
def explained(address: StoreAddress) -> Iterator[None]:
    """Let torch's errors about the store say what is known of the rendezvous.

    Raises:
        DistNetworkError, DistStoreError: as torch does, with more words.
    """
    try:
        yield
    except (DistNetworkError, DistStoreError) as error:
        seen = "" if address.rank == 0 else probe(address.host, address.port)
        raise type(error)(explain(address, seen, str(error))) from error


def probe(host: str, port: int) -> str:
    """Return what one plain connection to that address meets; empty when it is made."""
    try:
        with socket.create_connection((host, port), timeout=_PROBE_S):
            return ""
    except ConnectionRefusedError:
        return "the host refuses connections to that port: nobody listens there"
    except socket.gaierror as error:
        return f"this host knows no such name ({error.strerror})"
    except TimeoutError:
        return "nothing answers at that address"
    except OSError as error:
        return f"it cannot be reached ({error.strerror or error})"


def explain(address: StoreAddress, seen: str, torch_error: str) -> str:
    """Return the message of an error: `seen` is what `probe` says, `torch_error` what torch says."""
    who = f" on rank {address.rank} of {address.world_size}" if address.rank >= 0 else ""
    place = f"{address.host} port {address.port}"
    span = f"within {address.timeout.total_seconds():.1f} s"
    torch_error = torch_error.splitlines()[0] if torch_error else "nothing"
    if address.rank == 0:
        return (
            f"init_process_group{who}: the job's store cannot be opened at {place}"
            f"{f': {seen}' if seen else ''}.\n"
            f"torch said: {torch_error}\n"
            "Check that MASTER_ADDR names this host, on which rank 0 runs, and that MASTER_PORT may be used."
        )
    fact = seen or "something answers there, but it is no store: another program has the port"
    return (
        f"init_process_group{who}: rank 0 did not answer at {place} {span}: {fact}.\n"
        f"torch said: {torch_error}\n"
        "Check that rank 0 was started and still runs (its log comes first), that MASTER_ADDR names its host as seen "
        "from here, that MASTER_PORT is the same on every rank, and that no firewall closes it."
    )


def explain_port_in_use(address: StoreAddress, contested: str, torch_error: str) -> str:
    """Return the message of a rank 0 whose port another process has; `contested` is what waiting ranks are told."""
    fact = f"\n{contested}" if contested else " It is no start of a group: another program's, or a job that goes on."
    return (
        f"init_process_group on rank 0 of {address.world_size}: port {address.port} is in use by another process of "
        f"this host, where rank 0 would keep the job's store.{fact}\n"
        f"torch said: {torch_error.splitlines()[0] if torch_error else 'nothing'}\n"
        "Choose another MASTER_PORT (the same on every rank), or end that process: `ss -ltnp` shows which it is."
    )
