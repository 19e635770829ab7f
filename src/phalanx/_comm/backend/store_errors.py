"""Explain why the job's store cannot be reached: the rank, the address, what answers there, and advice.

The errors have torch's classes and text; the explanation comes before the text.
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
    """A `StoreAddress` is where a rank looks for the job's store; an unknown rank or world size is -1."""

    host: str
    port: int
    rank: int
    world_size: int
    timeout: timedelta


@contextlib.contextmanager
def explained(address: StoreAddress) -> Iterator[None]:
    """Add the rank, the address and advice to torch's errors about the store in the block.

    Raises:
        DistNetworkError, DistStoreError: as torch does, with an explanation.
    """
    try:
        yield
    except (DistNetworkError, DistStoreError) as error:
        seen = "" if address.rank == 0 else probe(address.host, address.port)
        raise type(error)(explain(address, seen, str(error))) from error


def probe(host: str, port: int) -> str:
    """Try one plain connection to that address; return why it failed, or ""."""
    try:
        with socket.create_connection((host, port), timeout=_PROBE_S):
            return ""
    except ConnectionRefusedError:
        return "the host refuses connections to that port: no process listens there"
    except socket.gaierror as error:
        return f"the name does not resolve on this host ({error.strerror})"
    except TimeoutError:
        return "nothing answers at that address"
    except OSError as error:
        return f"it cannot be reached ({error.strerror or error})"


def explain(address: StoreAddress, seen: str, torch_error: str) -> str:
    """Return an error's message: `seen` is the result of `probe`, `torch_error` is torch's text."""
    who = f" on rank {address.rank} of {address.world_size}" if address.rank >= 0 else ""
    place = f"{address.host} port {address.port}"
    span = f"within {address.timeout.total_seconds():.1f} s"
    torch_error = torch_error.splitlines()[0] if torch_error else "nothing"
    if address.rank == 0:
        return (
            f"init_process_group{who}: the job's store cannot be opened at {place}"
            f"{f': {seen}' if seen else ''}.\n"
            f"torch said: {torch_error}\n"
            "Check that MASTER_ADDR names this host, on which rank 0 runs, and that MASTER_PORT is permitted."
        )
    fact = seen or "a program answers there that is not a store"
    return (
        f"init_process_group{who}: rank 0 did not answer at {place} {span}: {fact}.\n"
        f"torch said: {torch_error}\n"
        "Check that rank 0 was started and still runs (read its log first), that MASTER_ADDR names its host as seen "
        "from here, that MASTER_PORT is the same on every rank, and that no firewall blocks it."
    )


def explain_port_in_use(address: StoreAddress, contested: str, torch_error: str) -> str:
    """Return the message of a rank 0 whose port another process uses; `contested` is the error of the waiting ranks."""
    fact = f"\n{contested}" if contested else " That process is another program, or a job that already runs."
    return (
        f"init_process_group on rank 0 of {address.world_size}: port {address.port} is in use by another process of "
        f"this host, so rank 0 cannot serve the job's store there.{fact}\n"
        f"torch said: {torch_error.splitlines()[0] if torch_error else 'nothing'}\n"
        "Choose another MASTER_PORT (the same on every rank), or end that process: `ss -ltnp` shows it."
    )
