"""The agent of a host tells its ranks, in a file without a name, what they need in a job on several hosts.

    0       {"address": …, "key": …, …}       where the job's store is, and what opens it
    4096    {"ranks": […], "reason": …}       once a host is lost: the ranks that are gone with it, and why

The key is in no variable: every program that a rank starts would inherit it. That a host is lost is told here because
a rank may be one of those who were cut off, and then nothing reaches it through the network.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from phalanx._comm.rendezvous.launchers import COORDINATOR
from phalanx._comm.symmetric_memory.memfd import create

_LOST_AT = 4096
_MAX_BYTES = 4096


@dataclass(frozen=True)
class LostHost:
    """Nothing will be heard of these ranks (numbers in the job) any more, because their host is lost."""

    ranks: tuple[int, ...]
    reason: str


def create_agent_file(address: str, key: str, relay: str = "") -> tuple[int, str]:
    """Return a descriptor of a new agent file, and the value of PHALANX_STORE that leads to it.

    Where `address` is a path the store needs no `key`; but workers of other hosts (`phalanx.rpc`) ask for it. `relay`
    is a path at which this process hands on what is sent to the store.
    """
    fd = create("phalanx-agent")
    told = {"address": address, "key": key, "relay": relay, "processes": _pid_namespace()}
    os.pwrite(fd, json.dumps(told).encode(), 0)
    return fd, f"{COORDINATOR}/proc/{os.getpid()}/fd/{fd}"


def read_store(fd: int) -> tuple[str, str]:
    """Return the coordinator's address and the key.

    The address is the relay's where there is one; it lies under the agent's number, which means nothing in a container
    with process numbers of its own.
    """
    told = json.loads(os.pread(fd, _LOST_AT, 0).rstrip(b"\0"))
    can_relay = told["relay"] and told["processes"] == _pid_namespace()
    return told["relay"] if can_relay else told["address"], told["key"]


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux
        return ""


def tell_lost(fd: int, lost: LostHost) -> None:
    """Tell the ranks of this host that a host is lost; the first one counts."""
    if read_lost(fd) is None:
        spans = [[first, last] for first, last in _spans(lost.ranks)]
        os.pwrite(fd, json.dumps({"ranks": spans, "reason": lost.reason[:1000]}).encode()[:_MAX_BYTES], _LOST_AT)


def read_lost(fd: int) -> LostHost | None:
    """Return the host that the agent has reported as lost; None if there is none."""
    data = os.pread(fd, _MAX_BYTES, _LOST_AT)
    if not data:
        return None
    told = json.loads(data)
    return LostHost(tuple(r for first, last in told["ranks"] for r in range(first, last + 1)), told["reason"])


def describe_loss(host: str, why: str) -> str:
    """Return why the ranks of a host are gone, in the words of a rank's error."""
    return f"its host, {host}, is lost: {why}"


def _spans(ranks: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return ranks as runs (first, last), so that a thousand ranks fit in the file."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    return spans
