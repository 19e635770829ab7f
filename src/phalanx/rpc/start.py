"""Make this process a worker (`init_rpc`), and stop being one (`shutdown`)."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.futures import Future

from phalanx._base.deadline import Deadline
from phalanx._base.host_addresses import is_public
from phalanx._base.log import get_logger
from phalanx._base.torch_names import find
from phalanx._comm.backend.init_file import check_init_file
from phalanx._comm.backend.rendezvous import agents_key, launched_rendezvous, open_at_address, own_address
from phalanx._comm.backend.torch_integration.futures import collect_calls
from phalanx._comm.control.key import Key
from phalanx._comm.control.key_file import find_key
from phalanx._comm.engines.gloo import local_address
from phalanx._comm.rendezvous.launchers import find_agents_store, find_launch
from phalanx._comm.rendezvous.rank_info import host_identity
from phalanx._comm.rendezvous.torch_store import base_of
from phalanx.errors import AuthenticationError, PhalanxError
from phalanx.rpc import current
from phalanx.rpc.agent import interrupts
from phalanx.rpc.agent.agent import Agent
from phalanx.rpc.agent.answer import Answer
from phalanx.rpc.autograd.serve import serve_autograd
from phalanx.rpc.options import BackendType, RpcBackendOptions
from phalanx.rpc.remote_error import error_of, set_error
from phalanx.rpc.rref import serve_references
from phalanx.rpc.termination import Termination
from phalanx.rpc.worker_info import WorkerAddress, WorkerInfo
from phalanx.rpc.workers import Workers

_JOIN_S = 300.0
_logger = get_logger(__name__)
_starting = threading.Lock()

# Functions that extend each new agent, before other workers can call it.
on_start: list[Callable[[Agent], None]] = []


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Make this process the worker `name`, which can call the others and be called by them.

    With `world_size` all workers start together, and this returns when all have joined. With `rank` alone, workers join
    and leave at any time. Without `rank`, the launcher provides the rank and, unless given, the world size.

    Workers find each other at `rpc_backend_options.init_method`: by default in the job's own store under `phalanx run`,
    else at MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError, TypeError: the name, rank or options are not valid.
        MismatchError: another worker has the name or rank.
        DeadlineError: some worker did not join within `rpc_timeout` (at least 300 s).
        torch.distributed.DistNetworkError: rank 0, which serves the store at that address, did not answer by then.
    """
    if not isinstance(name, str):
        raise TypeError(f"init_rpc: a worker's name is a str, got {type(name).__name__}")
    WorkerInfo(name, rank)  # checks the name
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
        number, size = find_rank(rank, world_size)
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
        collect_calls(has_calls, collect_all)
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
        agent.connections.accept_containers()
    except BaseException:
        agent.close("it could not join")
        raise
    return agent


def _open_network(agent: Agent, store: Any) -> WorkerAddress:
    """Accept workers of other hosts.

    Raises:
        AuthenticationError: the job has no key with which to authenticate these workers.
        PhalanxError: this host's address is public, and the user has not allowed that.
    """
    key = job_key()
    if key is None:
        raise AuthenticationError(
            f"init_rpc of {agent.me}: workers of the job are on several hosts, and there is no key to "
            "authenticate them. A call can run any code.\nMake one with `phalanx key` and copy it to all hosts, or "
            "start the script with `phalanx run`. `phalanx docs security` prints where that is explained."
        )
    address = network_address(store)
    if is_public(address) and not may_be_public():
        raise PhalanxError(
            f"init_rpc of {agent.me}: {address} is a public address, to which everybody on the internet can send.\n"
            "Use a private network between the hosts; or set PHALANX_ALLOW_PUBLIC_ADDRESS=1 if a firewall admits only "
            "these hosts: without one, others can reach the port, although they cannot authenticate."
        )
    agent.open_network(address, key)
    return agent.me


def shutdown(graceful: bool = True, timeout: float = 0.0) -> None:
    """Stop being a worker.

    With `graceful`, first wait for the calls in flight. If the number of workers is fixed, wait until all workers have
    called this and no call is in flight between any of them; otherwise until this worker neither waits for a call nor
    runs a call. Without `graceful`, leave at once. `timeout` limits the wait, in seconds; 0 is no limit.

    Raises:
        TypeError, ValueError: `timeout` is not a number of seconds; nothing was done.
        DeadlineError: some worker did not call this in time.
        PeerLostError: a worker is lost. In both cases this worker is shut down nevertheless.
    """
    agent = current.agent()
    if not isinstance(timeout, int | float):
        raise TypeError(f"shutdown: timeout is a number of seconds (0: no limit), got a {type(timeout).__name__}")
    if not timeout >= 0:
        raise ValueError(f"shutdown: timeout is a number of seconds (0: no limit), got {timeout}")
    try:
        if graceful:
            deadline = Deadline.after(timeout or None)
            if agent.membership.is_static:
                agent.termination.finish(deadline)
            else:
                agent.termination.wait_idle(deadline)
                _leave_store(agent)
    finally:
        try:
            if not graceful:
                _leave_store(agent)
        finally:
            agent.close("it was shut down.")
            current.set_agent(None)
            interrupts.uninstall()


def _leave_store(agent: Agent) -> None:
    try:
        agent.membership.leave(agent.me)
    except RuntimeError as error:  # the job's store is closed: no worker can look up this one
        _logger.debug("rpc: %s could not remove its name from the store: %s", agent.me, error)


def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Return the worker of this name, rank or WorkerInfo; without a name, this worker.

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
    """Return the timeout, in seconds, of calls without a timeout of their own; 0 is no timeout."""
    return current.agent().default_timeout_s


def _close_in_child() -> None:
    """Close the sockets in a forked child, which must neither keep them open nor answer for the worker."""
    if current.is_set():
        agent = current.agent()
        current.set_agent(None)
        interrupts.uninstall()
        interrupts.reset()
        agent.abandon()


def _prepare_fork() -> None:
    """Copy received tensors to private memory, so that a forked child does not share them with this process."""
    if current.is_set():
        try:
            current.agent().connections.prepare_fork()
        except OSError as error:
            _logger.warning(
                "rpc: this worker forks, and has no memory for copies of the large tensors that it has received (%s): "
                "the child shares their memory, which later tensors may overwrite.",
                error.strerror,
            )


os.register_at_fork(before=_prepare_fork, after_in_child=_close_in_child)


# Make `torch.futures.collect_all` and `wait_all` work with the futures of calls.
#
# PyTorch's functions wait in C++: user callbacks would run in the thread that reads an answer, and that thread may own
# a lock that the callbacks need. PyTorch also takes an error set from Python for a result, and keeps waiting for the
# other futures.


def has_calls(futures: Sequence[Any]) -> bool:
    """Return whether any of the futures is the future of a call."""
    return any(isinstance(one, Answer) for one in futures)


def collect_all(futures: Sequence[Any]) -> Future[Any]:
    """Return a future that completes when all futures have; if a future fails, it fails at once with the same error."""
    return _Collection(futures).future


class _Collection:
    def __init__(self, futures: Sequence[Any]) -> None:
        self.future: Answer[Any] = Answer()
        self._futures = list(futures)
        self._left = len(self._futures)
        self._lock = threading.Lock()  # guards the count; not owned while callbacks run
        for one in self._futures:
            if isinstance(one, Answer):
                one.on_done(self._on_done)
            else:
                one.add_done_callback(self._on_done)

    def _on_done(self, done: Any) -> None:
        try:
            done.value()
        except BaseException:
            if self._count_down(to=0):
                set_error(self.future, partial(error_of, done))
        else:
            if self._count_down():
                self.future.set_result(self._futures)

    def _count_down(self, to: int | None = None) -> bool:
        """Count one future, or all with `to=0`; return whether this has brought the count to 0."""
        with self._lock:
            before = self._left
            self._left = max(0, before - 1 if to is None else to)
            return bool(before) and not self._left


_make_store: Any = find(
    "torch.distributed.rendezvous._create_store_from_options",
    loses="phalanx.rpc.init_rpc does not work without world_size",
)

_kept: list[Any] = []  # torch's rendezvous handlers must stay alive: some own the store
_starts: dict[str, int] = {}


def find_rank(rank: int, world_size: int | None) -> tuple[int, int | None]:
    """Return rank and world size: the arguments, else the launcher's; the rank is -1 if there is neither.

    `world_size` stays None for a worker that joins a job without a fixed size; such a worker must pass its rank.
    """
    if rank >= 0:
        return rank, world_size
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) if world_size is None else world_size
    launch = find_launch(os.environ)
    if launch is not None:
        return launch.rank, launch.world_size if world_size is None else world_size
    return -1, world_size


def open_store(init_method: str, rank: int, world_size: int | None, timeout: timedelta) -> Any:
    """Return the job's store; in a job of fixed size, each `init_rpc` of this process uses its own key prefix."""
    handler = _addresses(init_method, rank, world_size, timeout)
    store, _, _ = next(handler)
    _kept.append(handler)
    store.set_timeout(timeout)
    if world_size is None:  # a worker that joins again must find the same members
        return PrefixStore("phalanx-rpc", store)
    number = _starts[init_method] = _starts.get(init_method, -1) + 1
    return PrefixStore(f"phalanx-rpc-{number}", store)


def _addresses(init_method: str, rank: int, world_size: int | None, timeout: timedelta) -> Iterator[Any]:
    if init_method.startswith("env://") and find_agents_store(os.environ):
        # works even if torch's `env://` handler was not replaced by ours
        return launched_rendezvous(rendezvous, init_method, timeout)
    if init_method.startswith("file://"):
        check_init_file(init_method, Deadline.after(timeout))
    if world_size is None:
        return iter([(_make_store(SimpleNamespace(init_method=init_method), rank), rank, -1)])
    url = f"{init_method}{'&' if '?' in init_method else '?'}rank={rank}&world_size={world_size}"
    if (store := open_at_address(url, timeout, "init_rpc")) is not None:
        return iter([(store, rank, world_size)])
    addresses: Iterator[Any] = rendezvous(init_method, rank, world_size, timeout=timeout)
    return addresses


def is_on_network(store: Any) -> bool:
    """Return whether workers on other hosts can reach the store."""
    return bool(getattr(base_of(store), "host", ""))


def network_address(store: Any) -> str:
    """Return the address at which other hosts reach this one: the agent's, or that of the route to the store."""
    if address := own_address():
        return address
    host = getattr(base_of(store), "host", "")
    return local_address(host) if host else "127.0.0.1"


def job_key() -> Key | None:
    """Return the job's key: from the agent of `phalanx run`, otherwise the user's own."""
    return agents_key() or find_key()


def may_be_public() -> bool:
    """Return whether the user has declared that a firewall protects a public address."""
    return os.environ.get("PHALANX_ALLOW_PUBLIC_ADDRESS") == "1"
