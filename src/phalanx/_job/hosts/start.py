"""Run this host's part of a job on several hosts: lead the job as the first host, or join the first host."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

from phalanx._base.host_addresses import OwnAddress, find_interface, is_own, own_addresses, resolve
from phalanx._comm.control.client import Client
from phalanx._comm.control.connection_guard import connections_allowed
from phalanx._comm.control.key import Key
from phalanx._comm.control.key_file import default_path, find_key, make_key
from phalanx._job.agent.host_resources import HostResources
from phalanx._job.agent.job import opened_host
from phalanx._job.agent.plan import JobPlan
from phalanx._job.agent.zygote_process import ZygoteProcess
from phalanx._job.coordinator.rendezvous import Rendezvous, join_endpoint, split_endpoint
from phalanx._job.coordinator.service import Service
from phalanx._job.hosts.control_channel import ControlChannel, Notices
from phalanx._job.hosts.first_host import JoinedJob, join_first_host, join_leader
from phalanx._job.hosts.gather import Gathering
from phalanx._job.hosts.job_spec import KEY, JobSpec
from phalanx._job.hosts.join_job import follow
from phalanx._job.hosts.line_forwarder import LineForwarder
from phalanx._job.hosts.succession.lead_guard import LeadGuard
from phalanx._job.hosts.succession.moved_job import JobMovedError, point_to
from phalanx.errors import AuthenticationError, CoordinationError, LaunchError

_CONNECTIONS_OF_HOST = 2


def run_with_other_hosts(plan: JobPlan, zygote: ZygoteProcess, signals: int, joined: JoinedJob | None = None) -> int:
    """Run this host's part of the job to its end; return the exit code. `joined` is the result of `phalanx join`.

    Raises:
        LaunchError: there is no key, the address belongs to another machine, no coordinator answers, or too few hosts
            joined in time.
    """
    rendezvous = plan.settings.rendezvous
    assert rendezvous is not None
    if joined is None and decide_lead(rendezvous):
        with contextlib.ExitStack() as stack:
            notices = Notices()
            key = Key.generate() if rendezvous.is_local else find_or_make_key(plan, rendezvous)
            opened = _open_service(plan, rendezvous, key, notices)
            if opened is not None:
                stack.enter_context(opened[0])
                return _lead(plan, zygote, signals, key, notices, *opened)
    with opened_host(plan, zygote, signals, lambda display: LineForwarder()) as host:
        return _follow(plan, rendezvous, host, joined or join_first_host(plan, rendezvous, host))


def decide_lead(rendezvous: Rendezvous) -> bool:
    """Return whether this host is the first host, which leads the job."""
    if rendezvous.leads is not None:
        return rendezvous.leads
    return is_own(split_endpoint(rendezvous.endpoint, 0)[0])


def _lead(
    plan: JobPlan,
    zygote: ZygoteProcess,
    signals: int,
    key: Key,
    notices: Notices,
    service: Service,
    advertised: list[OwnAddress],
) -> int:
    rendezvous = plan.settings.rendezvous
    assert rendezvous is not None
    port = service.address.port if service.address is not None else 0
    endpoints = _endpoints(rendezvous, advertised, port)
    with opened_host(plan, zygote, signals) as host:
        with _first_member(plan, rendezvous, service, notices, endpoints) as channel:
            guard = LeadGuard.of_first_host(rendezvous, channel, service.coordinator.replicas, key)
            gathering = Gathering(plan, rendezvous, host, channel, key, advertised, port, guard)
            try:
                return gathering.lead(service.local)
            except JobMovedError as moved:
                leader = moved.address
        host.display.print(
            f"phalanx run: this job is already running, led by the host at {leader}: this host joins it there"
        )
        host.pump.viewer = LineForwarder()
        joined = join_leader(host, (leader, *endpoints), key, rendezvous.join_timeout_s)
        return _follow(plan, rendezvous, host, joined, lambda address: point_to(service.local, address))


def _follow(
    plan: JobPlan,
    rendezvous: Rendezvous,
    host: HostResources,
    joined: JoinedJob,
    on_moved: Callable[[str], object] = lambda address: None,
) -> int:
    """Follow the job's leader to the job's end; if the job moves, join the new leader and follow it instead."""
    while True:
        environment = joined.job_spec.plan_environment(plan.environment, plan.settings.env)
        if environment != plan.environment:
            plan = replace(plan, environment=environment)
            host.zygote = host.zygote.restart(plan)
        try:
            return follow(plan, rendezvous, host, joined, on_moved)
        except JobMovedError as moved:
            host.display.print(f"phalanx run: the host at {moved.address} now leads this job: this host joins it there")
            endpoints = (moved.address, *joined.job_spec.endpoints)
            joined = join_leader(host, endpoints, joined.key, rendezvous.join_timeout_s)


def _endpoints(rendezvous: Rendezvous, advertised: list[OwnAddress], port: int) -> tuple[str, ...]:
    """Return the endpoints at which other hosts find the job: the configured ones, or this host's addresses."""
    if rendezvous.is_local:
        return ()
    if rendezvous.endpoint and not rendezvous.endpoint.startswith(":"):
        return (rendezvous.endpoint, *rendezvous.more_endpoints)
    return tuple(join_endpoint(own.address, port) for own in advertised)


@contextlib.contextmanager
def _first_member(
    plan: JobPlan, rendezvous: Rendezvous, service: Service, notices: Notices, endpoints: tuple[str, ...] = ()
) -> Iterator[ControlChannel]:
    if rendezvous.announce is not None:
        rendezvous.announce(service.local)
    client = Client(service.local)
    # Join before the job spec is stored: others join after that, and this agent is notified only of later joins.
    client.join({"kind": "first", "host": socket.gethostname(), "pid": os.getpid()})
    service.exempt(client)
    channel = ControlChannel(client, notices)
    try:
        client.set(KEY, JobSpec.of(plan.settings, plan.run_id, plan.environment, endpoints).to_bytes())
        yield channel
    finally:
        channel.close()


def _find_shortage(num_hosts: int) -> str:
    """Return why the coordinator cannot accept the connections of `num_hosts` hosts; "" if it can.

    Each other host has two connections: its agent's and its ranks'.
    """
    needed, allowed = _CONNECTIONS_OF_HOST * (num_hosts - 1), connections_allowed()
    if needed <= allowed:
        return ""
    return (
        f"{num_hosts} hosts need {needed} connections to this one, and no more than {allowed} are allowed here (three "
        f"quarters of the limit of open files). Raise the limit to {4 * -(-needed // 3)} or more on this host: "
        f"`ulimit -Hn`, LimitNOFILE= of a service, --ulimit nofile= of a container; or start fewer hosts."
    )


def _open_service(
    plan: JobPlan, rendezvous: Rendezvous, key: Key, notices: Notices
) -> tuple[Service, list[OwnAddress]] | None:
    """Start the job's coordinator; return it, and the addresses at which other hosts find it.

    Return None if another process on this host already listens on the endpoint, and no option says which host is the
    first: as with torchrun, running the same command twice on one host starts a job with two agents.
    """
    if rendezvous.is_local:
        service = Service(job=plan.run_id, lost_after_s=rendezvous.host_timeout_s, log=notices.put_refusal)
        return service, [OwnAddress("127.0.0.1", "lo")]
    if problem := _find_shortage(rendezvous.min_nodes):
        raise LaunchError(f"phalanx run: {problem}", exit_code=2)
    problems = []
    for endpoint in (rendezvous.endpoint, *rendezvous.more_endpoints):
        bind, advertised = decide_addresses(replace(rendezvous, endpoint=endpoint))
        try:
            service = Service(
                bind, key, job=plan.run_id, lost_after_s=rendezvous.host_timeout_s, log=notices.put_refusal
            )
        except CoordinationError as error:
            if error.reason == "taken" and rendezvous.leads is None:
                return None
            problems.append(f"phalanx run: {error}")
        else:
            return service, advertised
    raise LaunchError("\n".join(problems), exit_code=2)


def find_or_make_key(plan: JobPlan, rendezvous: Rendezvous) -> Key:
    """Return the job's key, as passed or stored on this host; if there is none, create it at the default path.

    Raises:
        LaunchError: the key is invalid or unsafe, or none can be created.
    """
    try:
        if rendezvous.key is not None:
            return Key.parse(rendezvous.key)
        key = find_key(plan.settings.key_file, plan.command_environment)
        if key is None:
            path = default_path(plan.command_environment)
            key, is_new = make_key(path)
            if is_new:
                from phalanx._job.output.standard import show

                show(
                    2,
                    f"phalanx run: created the key {path}: only hosts with this key can join. Hosts that do not share "
                    "this folder need a copy (mode 600); `phalanx key --print` shows it.",
                )
        return key
    except (AuthenticationError, ValueError) as error:
        raise LaunchError(f"phalanx run: {error}", exit_code=2) from None


def decide_addresses(rendezvous: Rendezvous) -> tuple[str, list[OwnAddress]]:
    """Return the coordinator's listening address, and the addresses at which others may reach it, most likely first.

    Raises:
        LaunchError: the configured address does not belong to this host, or this host has only loopback addresses.
    """
    addresses = own_addresses()
    far = [own for own in addresses if own.is_global] or [own for own in addresses if not own.is_loopback]
    host, port = "", 0
    if rendezvous.endpoint.startswith(":"):
        port = int(rendezvous.endpoint[1:])
    elif rendezvous.endpoint:
        host, port = split_endpoint(rendezvous.endpoint, 0)
    if rendezvous.local_addr and not host:
        host = rendezvous.local_addr
    if host:
        if not is_own(host):
            found = ", ".join(resolve(host)) or "nothing"
            own = ", ".join(each.address for each in addresses) or "none"
            raise LaunchError(
                f"phalanx run: this host should be the first, at {host}, but that is not one of its addresses: {host} "
                f"resolves to {found}, and this host has {own}. Give an address of this host, or a --node-rank on "
                "each host.",
                exit_code=2,
            )
        theirs = resolve(host) or [host]
        chosen = [own for own in addresses if own.address in theirs]
        # A name that resolves to the loopback here (Debian's 127.0.1.1) resolves to a reachable address elsewhere.
        if host != "localhost" and not _is_address(host) and all(own.is_loopback for own in chosen) and far:
            return f":{port}", far
        return join_endpoint(host, port), chosen or [OwnAddress(theirs[0], find_interface(theirs[0]))]
    if len(far) == 1:
        return join_endpoint(far[0].address, port), far
    if not far:
        raise LaunchError(
            "phalanx run: --nnodes: this host has no address that others could reach (`ip address` shows only the "
            "loopback interface). Connect this host, or try the job on this host alone: --rdzv-backend c10d "
            "--rdzv-endpoint localhost:29400 in two shells.",
            exit_code=2,
        )
    return f":{port}", far


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
