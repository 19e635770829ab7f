"""A leader other than the first host publishes its address where the job began.

    leader ── every second ──▶ where the job began ── no host listens there
                               │
                               └─ the first host has been started again, with the same command, and waits for hosts:
                                  it joins the leader, and redirects all hosts that join

So a requeued host or a restarted pod finds its job with the same command, whether or not it was the first host.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx._comm.control.client import Client
from phalanx._comm.control.key import Key
from phalanx._comm.diagnostics.printable import printable
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.settings import Settings
from phalanx._job.coordinator.rendezvous import split_endpoint
from phalanx._job.hosts.control_channel import ControlChannel
from phalanx._job.hosts.first_host import join_leader
from phalanx._job.hosts.job_spec import KEY as JOB_SPEC
from phalanx._job.hosts.succession.moved_job import MOVED_KEY, JobMovedError
from phalanx.errors import AuthenticationError, LaunchError, PhalanxError

_LEADS = "leads"  # the kind of a member that joins only to report the leader's address
_PUBLISHED = "launch/published/"  # with ADDRESS: a key that is set once the leader at ADDRESS has published its notice
_AGAIN_S, _TRY_S, _END_S = 1.0, 2.0, 3.0
_ANOTHER_KEY_S = 60.0  # a longer pause: an endpoint with another key belongs to another user, whose log shows each try
_FIND_S = 10.0  # the time limit for reaching a leader that has just published its address
_REDIRECT_S = 5.0


class LeaderNotice:
    """A `LeaderNotice` publishes the leader's `address` at `endpoints`, where the job began, until `close`."""

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
                    self._publish(endpoint)
                except AuthenticationError:
                    not_before[endpoint] = time.monotonic() + _ANOTHER_KEY_S
                except (PhalanxError, OSError, ValueError):  # no host is there, or one that rejects members
                    pass

    def _publish(self, endpoint: str) -> None:
        with Client(endpoint, self._key, timeout=_TRY_S) as client:
            if client.check([MOVED_KEY]):  # that coordinator redirects to an earlier leader, which may be lost
                client.set(MOVED_KEY, self._address)
            # without a job spec, the first host has not joined its coordinator yet, and it must be the first member
            if not client.check([JOB_SPEC]) or client.check([_PUBLISHED + self._address]):
                return
            facts = {"kind": _LEADS, "host": socket.gethostname(), "address": self._address}
            client.join(facts, watch=())
            client.set(_PUBLISHED + self._address, b"")
            client.leave("it has reported the job's leader")

    def close(self) -> None:
        """Stop publishing; wait up to three seconds for a request in progress."""
        self._over.set()
        self._thread.join(_END_S)


def read_notice(facts: Mapping[str, Any]) -> str:
    """Return the leader's address if these are the facts of a member that joined to publish it; otherwise ""."""
    if facts.get("kind") != _LEADS:
        return ""
    address = printable(str(facts.get("address")))
    try:
        split_endpoint(address, 0)
    except ValueError:
        return ""
    return address


def describe_second_job(facts: Mapping[str, Any]) -> str:
    """Return a warning for a host whose own job already runs, if a member has joined with a leader's notice, or ""."""
    address = read_notice(facts)
    if not address:
        return ""
    return (
        f"a job that began at this address is led by the host at {address}, while this job trains too. If it is "
        f"the same job, end this command and type: phalanx join {address}"
    )


def follow_notice(
    facts: Mapping[str, Any],
    settings: Settings,
    host: HostResources,
    channel: ControlChannel,
    key: Key,
    *,
    has_begun: bool,
) -> None:
    """Redirect this host to the leader of the job that began here, if a member has joined with that leader's notice.

    The notice counts only before this host has begun a job (`has_begun`), and only for the job that `settings` request.

    Raises:
        JobMovedError: this is the requested job. All hosts that have joined here are redirected.
        LaunchError: the leader does not answer.
    """
    address = read_notice(facts)
    if not address:
        return
    if has_begun:
        host.display.print(f"phalanx run: {describe_second_job(facts)}")
        return
    try:
        joined = join_leader(host, [address], key, _FIND_S)
    except LaunchError as error:
        raise LaunchError(
            f"{error}\nA job that began at this address is led by the host at {address}, which this host cannot "
            "reach. If that is the job of this command, open the firewall to that host, and run the command again; "
            "if it is another job, give this command another port.",
            exit_code=error.exit_code,
        ) from None
    joined.client.close()
    if not joined.job_spec.is_requested_by(settings):
        name = joined.job_spec.settings.target.name
        host.display.print(
            f"phalanx run: another job that began at this address, {printable(name)}, is still running: the host "
            f"at {address} leads it. This command starts a job of its own"
        )
        return
    channel.put_key(MOVED_KEY, address.encode())  # hosts that join later read it
    channel.put(-1, "moved", address=address)
    channel.flush(_REDIRECT_S)
    raise JobMovedError(address)
