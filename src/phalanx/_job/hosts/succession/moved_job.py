"""After the loss of its first host a job has moved: its new leader sends notices to the address where the job began.

    elected ── every second ──▶ where the job began ── no host listens there
                                │
                                └─ the first host has come back, with the command that it was started with, and waits
                                   for hosts: it joins the host that leads, and sends on all that come to it

So a requeued host or restarted pod, the first one or any other, finds its job with the same command.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx._comm.diagnostics.printable import printable
from phalanx._job.coordinator.rendezvous import split_endpoint
from phalanx._job.hosts.job_spec import KEY as JOB_SPEC
from phalanx.errors import AuthenticationError, PhalanxError

MOVED_KEY = "launch/moved"  # at the coordinator of a host that has joined its job again: where that is led
_LEADS = "leads"  # the kind of a member that joins only to report where the job is led
_TOLD = "launch/told/"  # a key prefix, followed by an address: the host that leads there has left a notice
_AGAIN_S, _TRY_S, _END_S = 1.0, 2.0, 3.0
_ANOTHER_KEY_S = 60.0  # an address with another key belongs to another user, who is notified of each attempt


class JobMovedError(Exception):
    """The job is led at `address`, and not where this host has looked for it."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


class LeaderNotice:
    """A `LeaderNotice` publishes at `endpoints`, where the job began, that `address` leads it now, until `close`."""

    def __init__(self, endpoints: Sequence[str], key: Key, address: str) -> None:
        self._endpoints = endpoints
        self._key = key
        self._address = address
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phalanx-notice", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        not_before: dict[str, float] = {}
        while not self._over.wait(_AGAIN_S):
            for endpoint in self._endpoints:
                if time.monotonic() < not_before.get(endpoint, 0.0):
                    continue
                try:
                    self._tell(endpoint)
                except AuthenticationError:
                    not_before[endpoint] = time.monotonic() + _ANOTHER_KEY_S
                except (PhalanxError, OSError, ValueError):  # no host is there, or one that rejects members
                    pass

    def _tell(self, endpoint: str) -> None:
        with Client(endpoint, self._key, timeout=_TRY_S) as client:
            if client.check([MOVED_KEY]):  # it joins a host that may be lost since
                client.set(MOVED_KEY, self._address)
            # before the job exists its first host has yet to join, and must be the first member
            if not client.check([JOB_SPEC]) or client.check([_TOLD + self._address]):
                return
            facts = {"kind": _LEADS, "host": socket.gethostname(), "address": self._address}
            client.join(facts, watch=())
            client.set(_TOLD + self._address, b"")
            client.leave("it has said who leads the job")

    def close(self) -> None:
        """End the thread, which may take as long as an answer."""
        self._over.set()
        self._thread.join(_END_S)


def read_notice(facts: Mapping[str, Any]) -> str:
    """Return where a job that began at this address is led now, if a member has joined with a notice; otherwise ""."""
    if facts.get("kind") != _LEADS:
        return ""
    address = printable(str(facts.get("address")))
    try:
        split_endpoint(address, 0)
    except ValueError:
        return ""
    return address


def describe_second_job(facts: Mapping[str, Any]) -> str:
    """Return a line for a host in training, if a member has joined with a notice of a job's leader; otherwise ""."""
    address = read_notice(facts)
    if not address:
        return ""
    return (
        f"a job that began at this address is led by the host at {address}, and this one trains beside it. If it is "
        f"the same, end this command and type: phalanx join {address}"
    )


def find_moved(client: Client) -> str:
    """Return where the job is led, if not at the coordinator that `client` has reached; otherwise ""."""
    return client.get(MOVED_KEY).decode() if client.check([MOVED_KEY]) else ""


def point_to(local: str, address: str) -> None:
    """Redirect clients of this host's own coordinator to `address`."""
    with contextlib.suppress(PhalanxError), Client(local) as client:
        client.set(MOVED_KEY, address)
