"""Call functions on other workers: `rpc_sync`, `rpc_async` and `remote`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.futures import Future

from phalanx._base.torch_names import find
from phalanx.errors import PeerLostError
from phalanx.rpc import current, profiler, wire
from phalanx.rpc.agent.agent import Agent
from phalanx.rpc.agent.answer import Answer
from phalanx.rpc.options import UNSET_RPC_TIMEOUT
from phalanx.rpc.references import RRefId
from phalanx.rpc.remote_error import error_of, set_error
from phalanx.rpc.rref import RRef
from phalanx.rpc.worker_info import UnknownWorkerError, WorkerAddress, WorkerInfo

_profiler_enabled: Any = find(
    "torch.autograd._profiler_enabled", loses="a profile does not show calls of phalanx.rpc", instead=bool
)
_find_builtin: Any = find(
    "torch.jit._builtins._find_builtin",
    loses="a profile shows calls of phalanx.rpc to functions of torch under other names",
    instead=lambda function: None,
)

To = str | int | WorkerInfo
_thread = threading.local()


def rpc_sync(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call `func` on the worker `to`, and return the result.

    Arguments and result are pickled; tensors are copied once. Any thread may call this.

    Raises:
        Exception: `func` raised it; its `__cause__` shows the traceback on the worker.
        DeadlineError: `timeout` seconds have passed (0: never; not given: the `rpc_timeout` of `init_rpc`).
        PeerLostError: the worker is lost; `func` may or may not have run.
    """
    return _call("rpc_sync", to, func, args, kwargs, timeout).wait()


def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Call `func` on the worker `to`, and return a Future of the result at once.

    Tensors among the arguments must not change until the Future completes.

    This blocks only for the first connection to `to`, and while too many calls to `to` are in flight
    (`RpcBackendOptions`).
    """
    future: Future[Any] = _call("rpc_async", to, func, args, kwargs, timeout)
    futures = getattr(_thread, "futures", None)
    if futures is not None:
        futures.append(future)
    return future


def remote(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Call `func` on the worker `to`, keep the result there, and return a reference to it at once.

    If the call fails, the first use of the reference raises the error.
    """
    agent = current.agent()
    member = find_worker(agent, to)
    name = _check(func)
    references = agent.references
    rref_id = references.new_id()
    work = (func, tuple(args or ()), dict(kwargs or {}))

    def send(work: Any, read: Callable[[Any], Any] | None = None) -> tuple[RRef[Any], Answer[Any]]:
        if member.uid == agent.me.uid:
            owned = references.make(rref_id, rref_id, member.uid)  # the call itself holds a reference
            rref: RRef[Any] = RRef._make(agent, member, rref_id, None, owned)
            ids = rref_id, rref_id
            try:
                done = agent.invoke(member, "remote", name, work, timeout, kind=wire.REMOTE, rref=ids, on_answer=read)
            except BaseException:
                _drop(agent, rref_id)
                raise
            done.on_done(lambda _: _drop(agent, rref_id))
            return rref, done
        ids = rref_id, references.new_id()
        done = agent.invoke(member, "remote", name, work, timeout, kind=wire.REMOTE, rref=ids, on_answer=read)
        return RRef._make(agent, member, rref_id, ids[1], None, done), done

    if not _profiler_enabled():
        return send(work)[0]
    key = _event_name("rpc_remote", func, name, agent.me, member)
    with record_function(key) as event:
        rref, done = send(*_profiled(key, work))
        rref._set_profiling_future(event._call_end_callbacks_on_future(done))
        return rref


def _drop(agent: Agent, rref_id: RRefId) -> None:
    agent.references.drop_fork(rref_id, rref_id)


def _event_name(what: str, func: Callable[..., Any], name: str, me: WorkerAddress, to: WorkerAddress) -> str:
    """Return the name that PyTorch gives to the call in its profiles."""
    name = _find_builtin(func) or name
    return f"{what}#{name}({me.info.name} -> {to.info.name})"


def _call(
    what: str,
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: float,
) -> Any:
    agent = current.agent()
    name = _check(func)
    member = find_worker(agent, to)
    work = (func, tuple(args) if args else (), kwargs or {})
    if not _profiler_enabled():
        return agent.invoke(member, what, name, work, timeout, is_awaited=what == "rpc_sync")
    key = _event_name(what, func, name, agent.me, member)
    with record_function(key) as event:
        work, read = _profiled(key, work)
        return _ended(event, agent.invoke(member, what, name, work, timeout, on_answer=read))


def _ended(event: Any, future: Answer[Any]) -> Future[Any]:
    """Return a future that completes once the profile has the event; torch's own future takes errors for results."""
    made: Answer[Any] = Answer()

    def resolve(_: object) -> None:
        try:
            value = future.value()
        except BaseException:
            set_error(made, partial(error_of, future))
        else:
            made.set_result(value)

    event._call_end_callbacks_on_future(future).add_done_callback(resolve)
    return made


def _profiled(key: str, work: tuple[Any, ...]) -> tuple[tuple[Any, ...], Callable[[Any], Any] | None]:
    """Return the call, and a function that reads its answer and adds the callee's events to this thread's profile."""
    profile = profiler.current_profile()
    return (work, None) if profile is None else profile.wrap(key, work)


def _check(func: Callable[..., Any]) -> str:
    if not callable(func):
        raise TypeError(f"function should be callable, got {type(func).__name__}")
    return getattr(func, "__qualname__", None) or type(func).__name__


def find_worker(agent: Agent, to: To) -> WorkerAddress:
    """Return the worker that `to` names.

    Raises:
        ValueError: there is no such worker, or `to` cannot name a worker.
        PeerLostError: the worker is lost.
    """
    if not isinstance(to, str | int | WorkerInfo):
        raise ValueError(f"Cannot get WorkerInfo from name {to}: a worker is named by its name, rank or WorkerInfo")
    member = agent.membership.find(to)
    if member is None:
        lost = agent.membership.find_lost(to)
        if lost is not None:
            why = agent.peer(lost).lost
            raise PeerLostError(
                f"{lost} is lost: {why} No worker of that name has joined since.", ranks=(lost.info.id,)
            )
        known = ", ".join(f"{one.info.name!r} (rank {one.info.id})" for one in agent.membership.members()[:16])
        raise UnknownWorkerError(f"Unknown destination worker {to}: there are {known}; could not find destination.")
    return member


@contextmanager
def wait_all() -> Iterator[None]:
    """Wait at the end of the block for all `rpc_async` calls that this thread has made in the block."""
    _thread.futures = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread.futures)
        finally:
            del _thread.futures


def call_method(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the object, on its owner."""
    return getattr(rref.local_value(), name)(*args, **kwargs)


call_method._calls_method = True  # type: ignore[attr-defined]
_HOW: dict[str, Callable[..., Any]] = {"sync": rpc_sync, "async": rpc_async, "remote": remote}


_FORWARDED = ("__call__", "__len__", "__getitem__", "__setitem__", "__delitem__", "__contains__")


class RRefProxy:
    """An `RRefProxy` is the result of `RRef.rpc_sync()`, `rpc_async()` and `remote()`: methods run on the owner."""

    def __init__(self, rref: RRef[Any], how: str, timeout: float = UNSET_RPC_TIMEOUT) -> None:
        self.rref = rref
        self._how: Callable[..., Any] = _HOW[how]
        self.rpc_timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") and name not in _FORWARDED:  # pickle and copy look up other special methods
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.rref._raise_if_failed()
        return self._how(self.rref.owner(), call_method, (self.rref, name, args, kwargs), timeout=self.rpc_timeout)


RRef._make_proxy = RRefProxy
