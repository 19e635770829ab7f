"""An anonymous file through which a host's agent passes its ranks the address of the job's store, and lost hosts.

    0       {"address": …, "key": …, …}       the address of the job's store, and the key that opens the store
    4096    {"ranks": […], "reason": …}       once a host is lost: the ranks of that host, and the reason

The first column is the offset in the file. The key is not in an environment variable, because every program that a rank
starts would inherit the variable. The agent reports a lost host here because the ranks may have lost their network.
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
    """A `LostHost` has the global `ranks` of a host that is lost, which will never answer, and the reason."""

    ranks: tuple[int, ...]
    reason: str


def create_agent_file(address: str, key: str, relay: str = "") -> tuple[int, str]:
    """Return the descriptor of a new agent file, and the value of PHALANX_STORE that leads to the file.

    If `address` is a path, the store needs no `key`, but workers on other hosts (`phalanx.rpc`) use the key. `relay` is
    the path at which this process relays messages to the store.
    """
    fd = create("phalanx-agent")
    content = {"address": address, "key": key, "relay": relay, "processes": _pid_namespace()}
    os.pwrite(fd, json.dumps(content).encode(), 0)
    return fd, f"{COORDINATOR}/proc/{os.getpid()}/fd/{fd}"


def read_store(fd: int) -> tuple[str, str]:
    """Return the address and the key of the store.

    With a relay, the address is the relay's path, except in another pid namespace than the agent's: the path contains
    the agent's pid.
    """
    content = json.loads(os.pread(fd, _LOST_AT, 0).rstrip(b"\0"))
    can_relay = content["relay"] and content["processes"] == _pid_namespace()
    return content["relay"] if can_relay else content["address"], content["key"]


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not on Linux
        return ""


def report_lost(fd: int, lost: LostHost) -> None:
    """Report a lost host to the ranks of this host; only the first report counts."""
    if read_lost(fd) is None:
        spans = [[first, last] for first, last in _spans(lost.ranks)]
        content = json.dumps({"ranks": spans, "reason": lost.reason[:500]}, ensure_ascii=False)
        os.pwrite(fd, content.encode()[:_MAX_BYTES], _LOST_AT)


def read_lost(fd: int) -> LostHost | None:
    """Return the host that the agent has reported as lost; None if there is none."""
    data = os.pread(fd, _MAX_BYTES, _LOST_AT)
    if not data:
        return None
    content = json.loads(data)
    return LostHost(tuple(r for first, last in content["ranks"] for r in range(first, last + 1)), content["reason"])


def describe_loss(host: str, why: str) -> str:
    """Return why the ranks of a host are lost, as text for a rank's error."""
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
