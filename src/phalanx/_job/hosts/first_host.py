"""Find the job's key and connect to the job's coordinator; wait until the first host has created them."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from phalanx._base.deadline import Deadline
from phalanx._base.ipc.event_loop import EventLoop, Source
from phalanx._base.ipc.wakeup import Mailbox, Wakeup
from phalanx._base.processes import ENDING_SIGNALS
from phalanx._comm.control.client import Client
from phalanx._comm.control.dealer import MEMBER_HEARTBEAT_S
from phalanx._comm.control.key import Key
from phalanx._comm.control.key_file import default_path, find_key
from phalanx._job.agent.host_resources import HostResources, raise_if_ending
from phalanx._job.agent.plan import JobPlan
from phalanx._job.coordinator.rendezvous import Rendezvous
from phalanx._job.hosts.job_spec import KEY, JobSpec
from phalanx._job.hosts.succession.moved_job import find_moved
from phalanx.errors import AuthenticationError, CoordinationError, DeadlineError, LaunchError, PhalanxError

T = TypeVar("T")
_PAUSE_S = 0.1
_FIRST_TRY_S, _TRY_S = 5.0, 20.0
_CALL_S = 30.0  # the timeout of each request to a coordinator that has answered before
_KEY_S = 60.0  # how long a network file system may take to show a file that another host has created
_NOTIFY_AFTER_S = 3.0


@dataclass(frozen=True)
class JoinedJob:
    """A `JoinedJob` is a connection to the job's coordinator, with the job's key and the job spec."""

    client: Client
    key: Key | None
    job_spec: JobSpec


def connect(
    endpoints: Sequence[str],
    key: Key | None,
    timeout_s: float,
    *,
    job: str = "",
    is_over: Callable[[], bool],
    log: Callable[[str], None],
) -> JoinedJob:
    """Connect to the coordinator of `job` at the first endpoint that answers.

    The coordinator may start later than this host. If it reports that the job has moved, connect to the current leader.

    Raises:
        LaunchError: the coordinator cannot be reached in time, or has another key or version (the message says which);
            or `is_over` returned True.
    """
    deadline, has_notified = Deadline.after(timeout_s), False
    began = time.monotonic()
    for endpoint in itertools.cycle(endpoints):
        try:
            limit_s = _TRY_S if has_notified else min(_FIRST_TRY_S, timeout_s)
            client = _open(endpoint, key, limit_s, job)
            break
        except AuthenticationError as error:
            if len(endpoints) == 1:
                raise LaunchError(f"phalanx run: {error}", exit_code=2) from None
            problem: PhalanxError = error
        except CoordinationError as error:
            problem = error
        except DeadlineError:
            problem = DeadlineError(
                f"A process listens at {endpoint}, but does not answer as a Phalanx coordinator: another program "
                "(such as torchrun's store) uses the port, or the first host's command is stopped. Find that process "
                "(`ss -ltnp` there), or use another port on all hosts."
            )
        now = time.monotonic()
        if deadline.passed or is_over():
            raise LaunchError(f"phalanx run: gave up after {now - began:.0f} s: {problem}") from None
        if not has_notified and now - began > _NOTIFY_AFTER_S:
            has_notified = True
            log(f"phalanx run: waiting for the first host. {str(problem).splitlines()[0]}")
        time.sleep(_PAUSE_S)
    client.timeout = _CALL_S
    try:
        job_spec = JobSpec.from_bytes(client.get(KEY, max(deadline.left_s, 1.0)))
    except (PhalanxError, ValueError) as error:
        client.close()
        raise LaunchError(f"phalanx run: {client.address}: {error}") from None
    return JoinedJob(client, key, job_spec)


def _open(endpoint: str, key: Key | None, limit_s: float, job: str) -> Client:
    client = Client(endpoint, key, timeout=limit_s, job=job, heartbeat_s=MEMBER_HEARTBEAT_S)
    try:
        moved = find_moved(client)
    except PhalanxError:
        client.close()
        raise
    if not moved:
        return client
    client.close()
    return Client(moved, key, timeout=limit_s, job=job, heartbeat_s=MEMBER_HEARTBEAT_S)


def join_first_host(plan: JobPlan, rendezvous: Rendezvous, host: HostResources) -> JoinedJob:
    """Find the job's key and connect to the job at its rendezvous; a signal interrupts the wait.

    Raises:
        LaunchError: as `connect`; there is no key; or a signal arrived.
    """
    over = threading.Event()

    def join(log: Callable[[str], None]) -> JoinedJob:
        key = None if rendezvous.is_local else _find_key(plan, rendezvous, over, log)
        endpoints = (rendezvous.endpoint, *rendezvous.more_endpoints)
        job = plan.settings.run_id
        return connect(endpoints, key, rendezvous.join_timeout_s, job=job, is_over=over.is_set, log=log)

    return run_interruptibly(host, over, join)


def join_leader(host: HostResources, endpoints: Sequence[str], key: Key | None, timeout_s: float) -> JoinedJob:
    """Connect to the job's leader at one of `endpoints`, with the job's key; a signal interrupts the wait.

    Raises:
        LaunchError: as `connect`; or a signal arrived.
    """
    over = threading.Event()
    return run_interruptibly(host, over, lambda log: connect(endpoints, key, timeout_s, is_over=over.is_set, log=log))


def _find_key(plan: JobPlan, rendezvous: Rendezvous, over: threading.Event, log: Callable[[str], None]) -> Key:
    """Return the job's key; wait up to 60 s until it exists.

    Hosts that share a home directory may start together for the first time: one creates the key, the others find it.

    Raises:
        LaunchError: there is no key, or the key is invalid or unsafe.
    """
    wait_s = min(_KEY_S, rendezvous.join_timeout_s)
    deadline, has_notified = Deadline.after(wait_s), False
    path = default_path(plan.command_environment)
    try:
        if rendezvous.key is not None:
            return Key.parse(rendezvous.key)
        while (key := find_key(plan.settings.key_file, plan.command_environment)) is None and not deadline.passed:
            if not has_notified:
                has_notified = True
                log(
                    f"phalanx run: no key yet ({path}); waiting {wait_s:g} s for the first host to create one, in case "
                    "the two hosts share this folder"
                )
            if over.wait(_PAUSE_S):
                break
            with contextlib.suppress(OSError):
                os.listdir(path.parent)  # makes a network file system reread the directory
    except (AuthenticationError, ValueError) as error:
        raise LaunchError(f"phalanx run: {error}", exit_code=2) from None
    if key is not None:
        return key
    raise LaunchError(
        f"phalanx run: no key to join {rendezvous.endpoint}: {path} does not exist here after {wait_s:g} s. The first "
        "host has not started, or does not share this folder. `phalanx key` creates the file, once, on any host. Copy "
        "it to every host (mode 600), or name a file that all of them see: PHALANX_KEY_FILE=…",
        exit_code=2,
    )


def run_interruptibly(
    host: HostResources,
    over: threading.Event,
    work: Callable[[Callable[[str], None]], T],
    when: str = "before the job began",
) -> T:
    """Run the blocking `work` in a thread, so that this thread handles signals; return the result.

    `work` is called with a function that prints a line.

    Raises:
        LaunchError: a signal arrived, which also sets `over`; `when` ends the message.
        BaseException: the exception of `work`.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    lines: Mailbox[str] = Mailbox()
    ended = Wakeup()

    def run() -> None:
        try:
            results.append(work(lines.put))
        except BaseException as error:
            errors.append(error)
        ended.ring()

    def show(ready: set[int]) -> None:
        for text in lines.receive_all() if lines.fileno() in ready else ():
            host.display.print(text)

    def on_signal(number: int) -> None:
        if number in ENDING_SIGNALS:
            over.set()
        raise_if_ending(number, when)

    thread = threading.Thread(target=run, name="phalanx-join", daemon=True)
    thread.start()
    loop = EventLoop(
        host.watch_signals(on_signal),
        Source(lambda ready: None, lambda: (ended.fileno(),)),
        Source(show, lambda: (lines.fileno(),)),
        host.watch_display(),
    )
    while not (results or errors):
        loop.turn()
    thread.join()
    show({lines.fileno()})
    lines.close()
    ended.close()
    if errors:
        raise errors[0]
    return results[0]
