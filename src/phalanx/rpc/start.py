"""Make this process a worker, and end that again: `init_rpc` and `shutdown`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from phalanx._base.deadline import Deadline
from phalanx._base.log import get_logger
from phalanx._comm.backend.torch_integration.futures import collect_calls
from phalanx._comm.engines.interfaces import is_public
from phalanx._comm.rendezvous.rank_info import host_identity
from phalanx.errors import AuthenticationError, PhalanxError
from phalanx.rpc import current
from phalanx.rpc.agent import collecting, interrupts
from phalanx.rpc.agent.agent import Agent
from phalanx.rpc.autograd.serve import serve_autograd
from phalanx.rpc.options import BackendType, RpcBackendOptions
from phalanx.rpc.rendezvous import find_place, is_on_network, job_key, may_be_public, network_address, open_store
from phalanx.rpc.rref import serve_references
from phalanx.rpc.termination import Termination
from phalanx.rpc.worker_info import WorkerAddress, WorkerInfo
from phalanx.rpc.workers import Workers

_JOIN_S = 300.0
_logger = get_logger(__name__)
_starting = threading.Lock()

# Code that adds to a worker (distributed autograd) is told of each agent here before anybody can call it.
on_start: list[Callable[[Agent], None]] = []


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Make this process the worker `name`, which can call the others and be called by them.

    With `world_size` (given, or known from the launcher) all workers start together, and this returns when all have
    come. Without it, workers join and leave as they like; each gives its own `rank`.

    They meet at `rpc_backend_options.init_method`; by default under `phalanx run` in the job's own store, else at
    MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError, TypeError: the name, rank or options are not valid.
        MismatchError: another worker has the name or rank.
        DeadlineError: some worker did not come within the timeout of a call (at least 300 s).
    """
    if not isinstance(name, str):
        raise TypeError(f"init_rpc: a worker's name is a str, got {type(name).__name__}")
    WorkerInfo(name, rank)  # looks at the name
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions, got "
            f"{type(rpc_backend_options).__name__}"
        )
    if not is_available():
        raise PhalanxError("init_rpc: phalanx.rpc runs on Linux only (it needs epoll and eventfd).")
    options = rpc_backend_options or RpcBackendOptions()
    with _starting:
        if current.is_set():
            raise RuntimeError("RPC is already initialized")
        number, size = find_place(rank, world_size)
        if number < 0 or (size is not None and number >= size):
            from_environment = options.init_method.startswith("env://")
            missing = (
                "environment variable RANK expected, but not set" if from_environment else "rank parameter missing"
            )
            raise ValueError(
                f"init_rpc of worker {name!r}: {f'rank {number} of {size}' if number >= 0 else missing}: give rank= "
                "(and world_size=), or start the script with `phalanx run`."
            )
        timeout_s = max(options.rpc_timeout, _JOIN_S) if options.rpc_timeout else 1e6
        store = open_store(options.init_method, number, size, timedelta(seconds=timeout_s))
        agent = start_agent(name, number, size, store, options, Deadline.after(timeout_s))
        current.set_agent(agent)
        interrupts.install()
        collect_calls(collecting.has_calls, collecting.collect_all)
        agent.open_for_calls()


def start_agent(
    name: str, number: int, size: int | None, store: Any, options: RpcBackendOptions, deadline: Deadline
) -> Agent:
    """Return an agent that has joined the other workers in `store`."""
    agent = Agent(name, number, host_identity(), options)
    membership = Workers(store, size)
    if size is None and is_on_network(store) and job_key() is not None:
        _open_network(agent, store)
    serve_references(agent)
    agent.termination = Termination(agent)
    serve_autograd(agent)
    for extend in on_start:
        extend(agent)
    agent.start(membership)
    try:
        membership.join(agent.me, deadline, lambda: _open_network(agent, store))
        agent.connections.meet_containers()
    except BaseException:
        agent.close("it could not join")
        raise
    return agent


def _open_network(agent: Agent, store: Any) -> WorkerAddress:
    """Accept workers of other hosts.

    Raises:
        AuthenticationError: the job has no key; nobody is let in without one.
    """
    key = job_key()
    if key is None:
        raise AuthenticationError(
            f"init_rpc of {agent.me}: workers of the job are on several hosts, and there is no key for them to know "
            "each other by: a call runs code.\nMake one with `phalanx key` and copy it to all hosts, or start the "
            "script with `phalanx run`. `phalanx docs security` prints where that is explained."
        )
    address = network_address(store)
    if is_public(address) and not may_be_public():
        raise PhalanxError(
            f"init_rpc of {agent.me}: {address} is a public address, to which everybody on the internet can send.\n"
            "Let the hosts meet in a private network; or set PHALANX_ALLOW_PUBLIC_ADDRESS=1 where a firewall lets only "
            "these hosts in: strangers are refused, but see the port."
        )
    agent.open_network(address, key)
    return agent.me


def shutdown(graceful: bool = True, timeout: float = 0.0) -> None:
    """Stop being a worker.

    With `graceful`, first wait until all calls in progress have ended on all workers; if the number of workers is
    fixed, until all workers have called this, too. Else the others see this one leave at once. `timeout` (seconds; 0:
    no limit) is for the wait.

    Raises:
        DeadlineError: some worker did not come in time.
        PeerLostError: a worker is lost. In both cases this worker is shut down all the same.
    """
    agent = current.agent()
    try:
        if graceful:
            deadline = Deadline.after(timeout or None)
            if agent.membership.is_static:
                agent.termination.finish(deadline)
            else:
                agent.termination.wait_idle(deadline)
                _leave_quietly(agent)
    finally:
        try:
            if not graceful:
                _leave_quietly(agent)
        finally:
            agent.close("it was shut down.")
            current.set_agent(None)
            interrupts.uninstall()


def _leave_quietly(agent: Agent) -> None:
    try:
        agent.membership.leave(agent.me)
    except RuntimeError as error:  # the job's store is gone: no other worker looks for us there
        _logger.debug("rpc: %s could not take its name out of the store: %s", agent.me, error)


def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Return the worker of this name; without one, this worker.

    Raises:
        ValueError: there is no worker of this name.
    """
    from phalanx.rpc.invoke import find_worker

    agent = current.agent()
    return agent.me.info if worker_name is None else find_worker(agent, worker_name).info


def is_available() -> bool:
    """Return whether workers can be started on this system."""
    return sys.platform.startswith("linux")


def get_rpc_timeout() -> float:
    """Return after how many seconds a call of this worker fails that sets no time-out of its own; 0 is never."""
    return current.agent().default_timeout_s


def _close_in_child() -> None:
    """Close the sockets in a fork of a worker, which must not keep them open, nor answer in the worker's name."""
    if current.is_set():
        agent = current.agent()
        current.set_agent(None)
        interrupts.uninstall()
        interrupts.reset()
        agent.abandon()


def _prepare_fork() -> None:
    """Let a fork have tensors of its own, as it has of all else."""
    if current.is_set():
        try:
            current.agent().connections.prepare_fork()
        except OSError as error:
            _logger.warning(
                "rpc: this worker forks, and has no memory for copies of the large tensors that it has received (%s): "
                "the child shares them, and may see others in their place.",
                error.strerror,
            )


os.register_at_fork(before=_prepare_fork, after_in_child=_close_in_child)
