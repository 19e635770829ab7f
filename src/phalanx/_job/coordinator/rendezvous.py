"""A `Rendezvous` is where the hosts of a job find each other: at the coordinator that one of them runs.

This module does not inspect the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx._base.loss_detection import HOST_TIMEOUT_S


@dataclass(frozen=True)
class Rendezvous:
    """A `Rendezvous` is where the hosts of a job find each other, with this host's role.

    `endpoint` is HOST:PORT of the first host; empty if this host is the first, chooses a free port and prints the
    command for the others. `leads`: whether this host starts the coordinator there; None: only if HOST is an address of
    this host. `node_rank` is None if hosts are numbered in the order of joining, after the leader. `key` is the job's
    key as text; None if it must be looked up.

    `more_endpoints` are tried after `endpoint`: the first host uses the first one that it can bind, the others the
    first one at which this job answers. `is_local`: all agents run on one host, no port is opened and no key is
    needed; the `endpoint` of the other agents is the path that the first passes to `announce` once its coordinator
    serves. `witness` is the address of an additional voter, for a job of two hosts that should survive the loss of a
    host; only the first host needs it.
    """

    endpoint: str = ""
    leads: bool | None = None
    node_rank: int | None = None
    min_nodes: int = 1
    max_nodes: int = 1
    key: str | None = None
    join_timeout_s: float = 600.0
    last_call_s: float = 30.0
    host_timeout_s: float = HOST_TIMEOUT_S
    local_addr: str = ""
    more_endpoints: tuple[str, ...] = ()
    is_local: bool = False
    announce: Callable[[str], object] | None = None
    witness: str = ""


def split_endpoint(endpoint: str, default_port: int) -> tuple[str, int]:
    """Return host and port of HOST, HOST:PORT, [V6] or [V6]:PORT, as torchrun does.

    Of an IPv6 address without brackets, the part after the last colon is the port.

    Raises:
        ValueError: the text has none of these forms.
    """
    text = endpoint.strip()
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default_port)
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535):
        raise ValueError(f"must be HOST or HOST:PORT, with a port from 0 to 65535, got {endpoint!r}")
    if not host or not all(letter.isalnum() or letter in "_.:-%" for letter in host):
        raise ValueError(f"must be HOST or HOST:PORT, with a name or an address as HOST, got {endpoint!r}")
    return host, int(port)


def join_endpoint(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
