"""An `RRef` is a reference to an object on one worker; any worker can have references to it.

The module `references` shows the messages that create, send and drop a reference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.autograd.profiler import record_function
from torch.futures import Future

from phalanx.errors import ClosedError, DeadlineError, PeerLostError, PhalanxError
from phalanx.rpc import current, wire
from phalanx.rpc.agent.agent import Agent
from phalanx.rpc.agent.calls import owner_lost
from phalanx.rpc.options import UNSET_RPC_TIMEOUT, seconds_of
from phalanx.rpc.references import OwnedObject, RRefId
from phalanx.rpc.remote_error import set_error
from phalanx.rpc.serialization import Payload, register, unpickling
from phalanx.rpc.worker_info import WorkerAddress, WorkerInfo

T = TypeVar("T")


class RRef(Generic[T]):
    """`RRef` is a reference to `value`, which stays on this worker and lives as long as any worker refers to it.

    References to objects of other workers are returned by `remote`, or received in calls and their results.
    """

    _agent: Agent
    _owner: WorkerAddress
    _id: RRefId
    _fork: RRefId | None
    _owned: OwnedObject | None
    _confirmed: Future[Any] | None
    _make_proxy: ClassVar[Callable[[RRef[Any], str, float], Any]]  # `invoke` sets it

    def __init__(self, value: T, type_hint: Any = None) -> None:
        if type_hint is not None and not isinstance(value, torch.nn.Module):
            _check_type(value, type_hint)
        agent = current.agent()
        owned = agent.references.make(agent.references.new_id())
        owned.future.set_result(value)
        self._set(agent, agent.me, owned.id, None, owned)

    def _set(
        self,
        agent: Agent,
        owner: WorkerAddress,
        rref_id: RRefId,
        fork: RRefId | None,
        owned: OwnedObject | None,
        confirmed: Future[Any] | None = None,
    ) -> None:
        self._agent = agent
        self._owner = owner
        self._id = rref_id
        self._fork = fork
        self._owned = owned
        self._confirmed = confirmed
        self._profiling: Future[Any] | None = None
        self._type: Future[Any] | None = None

    @classmethod
    def _make(cls, *fields: Any) -> RRef[Any]:
        made = cls.__new__(cls)
        made._set(*fields)
        return made

    def __del__(self) -> None:
        fork = getattr(self, "_fork", None)
        if fork is not None and not self._agent.closed:
            self._agent.references.dropped.append((self._owner.uid, self._id, fork))
            self._agent.reader.wake_by(0.0)

    def is_owner(self) -> bool:
        """Return whether the object is on this worker."""
        return self._owned is not None

    def owner(self) -> WorkerInfo:
        """Return the worker that the object is on."""
        return self._owner.info

    def owner_name(self) -> str:
        """Return the name of the worker that the object is on."""
        return self._owner.info.name

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner has registered this reference."""
        self._check_open()
        if self._owned is not None or self._confirmed is None:
            return True
        return self._confirmed.done() and _succeeded(self._confirmed)

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Wait until the object is made; return the object itself on its owner, and a copy elsewhere.

        Raises:
            Exception: the function that should make the object raised it.
            PeerLostError: the owner is lost, and the object with it.
        """
        self._check_open()
        if self._owned is not None:
            value: T = _wait(self._owned.future, self._timeout(timeout), f"RRef.to_here on its owner, {self._owner}")
            return value
        if self._profiling is not None:
            self._profiling.wait()
        return self._fetch(timeout, is_awaited=True).wait()  # type: ignore[no-any-return]

    def _fetch(self, timeout: float = UNSET_RPC_TIMEOUT, *, is_awaited: bool = False) -> Any:
        self._raise_if_failed()
        return self._agent.invoke(
            self._owner, "RRef.to_here", str(self._id), self._id, timeout, kind=wire.FETCH, is_awaited=is_awaited
        )

    def local_value(self) -> T:
        """Wait until the object is made, and return it. Only the owner may call this.

        Raises:
            RuntimeError: this worker is not the owner.
        """
        self._check_open()
        if self._owned is None:
            number, fork = (_show(self._agent, one) for one in (self._id, self._fork))
            raise RuntimeError(
                f"For UserRRef(rref_id={number}, fork_id={fork}), can't call localValue() on user "
                f"{self._agent.me.info}. Call it on owner {self._owner.info}, or to_here() for a copy."
            )
        value: T = self._owned.future.wait()
        return value

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy for the object: each of its methods runs on the owner, and returns the result."""
        return type(self)._make_proxy(self, "sync", timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy for the object: each of its methods runs on the owner, and returns a Future."""
        return type(self)._make_proxy(self, "async", timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy for the object: each of its methods runs on the owner, and returns an RRef."""
        return type(self)._make_proxy(self, "remote", timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run `phalanx.rpc.autograd.backward` from the object, on its owner.

        The object must be a tensor with one element. Only the owner may omit the context; the object's own
        `backward()` then runs.

        Raises:
            RuntimeError: the object is not such a tensor, or its owner has no such context.
        """
        if self._owned is None:
            if dist_autograd_ctx_id == -1:
                raise RuntimeError("User RRefs require 'dist_autograd_ctx_id' to be specified")
            work: Any = (_run_backward, (self, dist_autograd_ctx_id, retain_graph), {})
            self._agent.invoke(self._owner, "RRef.backward", str(self._id), work, 0.0, is_awaited=True).wait()
        else:
            _run_backward(self, dist_autograd_ctx_id, retain_graph)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Return the class of the object, as a Future unless `blocking`. If a request has failed, send another."""
        self._check_open()
        # An earlier request may have timed out while the object was being made.
        if self._type is None or (self._type.done() and not _succeeded(self._type)):
            if self._owned is not None:
                self._type = Future()
                self._type.set_result(_type_of(self))
            else:
                self._raise_if_failed()
                work: Any = (_type_of, (self,), {})
                name = f"rpc_async#_rref_typeof_on_owner({self._agent.me.info.name} -> {self._owner.info.name})"
                with record_function(name):
                    self._type = self._agent.invoke(self._owner, "RRef._get_type", str(self._id), work, timeout)
        return self._type.wait() if blocking else self._type

    def _get_future(self) -> Future[Any]:
        """Return a future that completes when the owner has registered this reference; on the owner, the object's."""
        if self._owned is not None:
            return self._owned.future
        if self._confirmed is None:
            done: Future[Any] = Future()
            done.set_result(None)
            return done
        return self._confirmed

    def _get_profiling_future(self) -> Future[Any] | None:
        return self._profiling

    def _set_profiling_future(self, future: Future[Any]) -> None:
        self._profiling = future

    def _timeout(self, timeout: float) -> float:
        return seconds_of(timeout, self._agent.default_timeout_s)

    def _check_open(self) -> None:
        if self._agent.closed:
            raise ClosedError(
                f"RRef of {self._owner}: this worker was shut down, and released all its references. (Cannot call "
                "to_here() on it after deletion.)"
            )

    def _raise_if_failed(self) -> None:
        """Raise if the call that makes the object has failed, or the owner is lost."""
        confirmed = self._confirmed
        if confirmed is not None and confirmed.done():
            try:
                confirmed.value()
            except DeadlineError as error:
                raise DeadlineError(f"RRef creation: {error}", missing=error.missing) from None
        owner = self._agent.peer(self._owner)
        if owner.lost:
            raise owner_lost(owner)

    def __reduce__(self) -> Any:
        raise RuntimeError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: pass it to rpc_sync, "
            "rpc_async or remote, or return it from a function that they call."
        )

    def __repr__(self) -> str:
        if self._owned is not None:
            return f"OwnerRRef({_show(self._agent, self._id)})"
        return f"UserRRef(RRefId = {_show(self._agent, self._id)}, ForkId = {_show(self._agent, self._fork)})"


def _show(agent: Agent, number: RRefId | None) -> str:
    if number is None:
        return "none"
    maker = agent.membership.by_uid(number[0])
    return f"GloballyUniqueId(created_on={maker.info.id if maker else number[0]}, local_id={number[1]})"


def _type_of(rref: RRef[Any]) -> type:
    return type(rref.local_value())


def _run_backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    from phalanx.rpc import autograd  # only this function needs autograd

    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"RRef should contain a tensor for .backward(), not {type(value).__name__}")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        autograd.backward(context_id, [value], retain_graph)


def _succeeded(future: Future[Any]) -> bool:
    try:
        future.value()
    except BaseException:
        return False
    return True


def _wait(future: Future[Any], timeout_s: float = 0.0, what: str = "") -> Any:
    """Wait for a future at most `timeout_s` (0: no limit), and return its value."""
    if timeout_s and not future.done():
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        if not done.wait(timeout_s):
            raise DeadlineError(f"{what}: RPC ran for more than set timeout ({timeout_s * 1000:.0f} ms).")
    return future.wait()


def _check_type(value: Any, type_hint: Any) -> None:
    if isinstance(type_hint, type) and not isinstance(value, type_hint):
        raise TypeError(f"RRef: type_hint is {type_hint.__name__}, and the value is a {type(value).__name__}")


# -- sending -----------------------------------------------------------------------------------------------------------


def _reduce_rref(rref: RRef[Any], payload: Payload) -> Any:
    agent, to = rref._agent, payload.to
    if agent.closed:  # the process may be another worker by now
        raise ClosedError(
            f"RRef of {rref._owner}: this worker was shut down since, and released all its references. (Cannot call "
            "fork an UserRRef after deletion.)"
        )
    me = agent.me.uid
    fork: RRefId | None = None
    payload.kept.append(rref)
    goes_home = rref._owner.uid == to.uid
    if not goes_home or to.uid == me or payload.is_answer:  # otherwise `payload.kept` suffices until the answer
        fork = agent.references.new_id()
        if rref._owned is not None:
            agent.references.add_fork(rref._owned, fork, to.uid)
            payload.undo.append(lambda: agent.references.drop_fork(rref._id, fork))
        else:
            agent.references.keep_fork(fork, rref, to.uid)
            payload.undo.append(lambda: agent.references.release_fork(fork))
    payload.forks.append((rref._owner.uid, rref._owner.info.name, rref._id, fork, me))
    return _receive_rref, (len(payload.forks) - 1,)


def _receive_rref(number: int) -> RRef[Any]:
    rref: RRef[Any] = unpickling().forks[number]
    return rref


register(RRef, _reduce_rref)


def serve_references(agent: Agent) -> None:
    """Register the functions with which this worker sends and receives references."""

    def make(owner_uid: int, owner_name: str, rref_id: RRefId, fork: RRefId | None, parent: int) -> RRef[Any]:
        if owner_uid == agent.me.uid:
            owned = agent.references.find_or_expect(rref_id)
            if owned is None:
                if fork is not None:
                    _notify_parent(parent, fork)
                raise PhalanxError(
                    f"RRef: {agent.me} no longer owns object {rref_id}: the worker that sent the reference is lost."
                )
            # this worker sent the reference to itself: the fork was counted only while in flight
            if fork is not None and parent == owner_uid:
                agent.references.drop_fork(rref_id, fork)
            elif fork is not None:
                _notify_parent(parent, fork)
            return RRef._make(agent, agent.me, rref_id, None, owned)
        owner = agent.membership.by_uid(owner_uid) or agent.membership.find(owner_name)
        if owner is None or owner.uid != owner_uid:
            if fork is not None:
                _notify_parent(parent, fork)
            raise PeerLostError(f"RRef: its owner, worker {owner_name!r}, is lost, and the object with it.")
        assert fork is not None
        confirmed: Future[Any] | None = None
        if parent != owner_uid:
            message = agent.control(owner, "announce_fork", (rref_id, fork), 0.0)
            message.on_done(lambda _: _notify_parent(parent, fork))
            confirmed = message
        return RRef._make(agent, owner, rref_id, fork, None, confirmed)

    def _notify_parent(parent: int, fork: RRefId) -> None:
        member = agent.membership.by_uid(parent)
        if member is not None and not agent.closed:
            agent.notify(member, "fork_arrived", fork)

    def announce_fork(holder: WorkerAddress, message: tuple[RRefId, RRefId]) -> None:
        if not agent.references.announce_fork(*message, holder.uid):
            raise PhalanxError(
                f"RRef: {agent.me} owns no object {message[0]} (any more): the worker that sent the reference is lost."
            )

    def drop_forks(holder: WorkerAddress, message: list[tuple[RRefId, RRefId]]) -> None:
        agent.release_later([one for one in (agent.references.drop_fork(*pair) for pair in message) if one is not None])

    def fork_arrived(holder: WorkerAddress, fork: RRefId) -> None:
        agent.references.release_fork(fork)

    def lost(member: WorkerAddress) -> None:
        freed, orphans = agent.references.lose(member.uid)
        for owned in orphans:
            text = f"RRef: {member} was lost before its call made the object."
            set_error(owned.future, partial(PeerLostError, text, ranks=(member.info.id,)))
        agent.release_later(freed)

    agent.make_rref = make
    agent.controls.update(announce_fork=announce_fork, drop_forks=drop_forks, fork_arrived=fork_arrived)
    agent.on_lost.append(lost)
