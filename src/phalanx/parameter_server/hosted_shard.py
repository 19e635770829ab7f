"""A `HostedShard` is one server's copy of a shard. The primary answers trainers; its replica can take over.

trainer              server: primary of shard i            next server: replica of shard i
push ──────────────► apply, number the entry
                     receive ────────────────────────────► apply in the order of the numbers
     ◄────────────── acknowledged ◄─────────────────────── done
                     (killed)                              primary from now on; the next server gets a copy
push again ──────────────────────────────────────────────► acknowledged, and applied unless it already was

    role      this server                                             next
    EMPTY     has no copy of the shard                                PRIMARY: the first trainer creates it
                                                                      REPLICA: the primary sends a copy
    REPLICA   applies the primary's entries, and answers no trainer   REPLICA: the primary sends another copy
                                                                      PRIMARY: the primary is lost
                                                                      EMPTY: all trainers have left
    PRIMARY   answers trainers                                        EMPTY: all trainers have left
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from torch import Tensor
from torch.futures import Future

from phalanx.errors import ClosedError, MismatchError, PeerLostError, PhalanxError, summary_of
from phalanx.parameter_server.groups import Group, Options
from phalanx.parameter_server.layout import State, ring
from phalanx.parameter_server.shard import NoCopyError, PushedGradients, Shard, Spec, TrainerLostError
from phalanx.rpc import current, rpc_async
from phalanx.rpc.agent.agent import Agent
from phalanx.rpc.functions import async_execution
from phalanx.rpc.worker_info import WorkerAddress

_WAIT = object()  # returned instead of an answer by a request that must wait


class ShardRole(Enum):
    """`ShardRole` is this server's role for a shard; the module's table shows the transitions."""

    EMPTY = "empty"
    REPLICA = "replica"
    PRIMARY = "primary"


TRANSITIONS: Mapping[ShardRole, Set[ShardRole]] = {
    ShardRole.EMPTY: {ShardRole.PRIMARY, ShardRole.REPLICA},
    ShardRole.REPLICA: {ShardRole.REPLICA, ShardRole.PRIMARY, ShardRole.EMPTY},
    ShardRole.PRIMARY: {ShardRole.EMPTY},
}


@dataclass(frozen=True)
class _WaitingRequest:
    """A `_WaitingRequest` is a request with the function that tries to answer it."""

    attempt: Callable[[], Any]
    future: Future[Any]


class HostedShard:
    """A `HostedShard` is this server's copy of a shard, in one of three roles."""

    def __init__(self, agent: Agent, name: str, index: int) -> None:
        self._agent = agent
        self._name = name
        self._index = index
        # Guards requests, which are tried and applied one at a time. Answers are sent after the lock is released.
        self._lock = threading.Lock()
        self._shard: Shard | None = None
        self.role = ShardRole.EMPTY
        self._primary: int | None = None  # the uid of the primary, on a replica
        self._replica: str | None = None
        self._installed: Future[Any] | None = None
        self._number = 0  # the number of the last entry applied
        self._early_entries: dict[int, tuple[tuple[Any, ...], Future[Any]]] = {}
        self._waiting: list[_WaitingRequest] = []
        self._known_losses: dict[str, set[int | None]] = {}  # by trainer: the workers already lost when it attached
        self._load_requests: dict[str, int] = {}  # by trainer: the number of the load that the trainer waits for
        self._failure: PhalanxError | None = None  # once set, the shard's contents are invalid

    def _become(self, role: ShardRole) -> None:
        assert role in TRANSITIONS[self.role], (self.role, role)
        self.role = role

    # -- requests ------------------------------------------------------------------------------------------------------

    def request(self, attempt: Callable[[], Any]) -> Future[Any]:
        """Return a future for the answer of `attempt`, which is tried now and after each change of the shard."""
        one = _WaitingRequest(attempt, Future())
        with self._lock:
            self._waiting.append(one)
        self.answer_requests()
        return one.future

    def answer_requests(self) -> None:
        """Answer the requests that can be answered now."""
        answered: list[tuple[Future[Any], Any]] = []
        with self._lock:
            changed = True
            while changed:  # an answered request may make another one answerable
                changed = False
                for one in list(self._waiting):
                    try:
                        result = one.attempt()
                    except Exception as error:  # to be raised on the trainer
                        result = error
                    if result is not _WAIT:
                        self._waiting.remove(one)
                        answered.append((one.future, result))
                        changed = True
        for future, result in answered:
            if isinstance(result, Future):
                result.add_done_callback(partial(forward_result, future))
            elif isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _find_shard(self) -> Shard | None:
        """Return the shard if this server is its primary, else None; raise NoCopyError if this server has no copy."""
        if self._shard is None:
            raise NoCopyError(f"server {self._agent.me.info.name!r} has no copy of shard {self._index}.")
        return self._shard if self.role is ShardRole.PRIMARY else None

    def create(self, spec: Spec, state: State) -> Any:
        """Create the shard unless it exists; wait while a shard that the first trainer has closed still exists."""
        if self._shard is None:
            self._shard = Shard(spec, state)
            self._become(ShardRole.PRIMARY)
            members = [one for one in map(self._agent.membership.find, spec.trainers) if one is not None]
            self._shard.workers = {one.info.name: one.uid for one in members}
            on_thread(partial(self._agent.watch, members))
            self._choose_replica()
        elif self.role is not ShardRole.PRIMARY or spec.trainers[0] in self._shard.left:
            return _WAIT
        return self._ack(self._installed)

    def cancel_creation(self) -> list[str]:
        """Stop waiting for the trainers that use the previous shard of this name, and return their names."""
        with self._lock:
            cancelled = [
                one for one in self._waiting if isinstance(one.attempt, partial) and one.attempt.func == self.create
            ]
            self._waiting = [one for one in self._waiting if one not in cancelled]
        for one in cancelled:
            one.future.set_exception(
                ClosedError(f"ParameterServer {self._name!r}: its trainer has stopped waiting for this shard.")
            )
        return list(self.clocks())

    def attach(self, trainer: str, worker: int, described: str) -> Any:
        """Return the trainer's clock and the number of loaded states, once the shard exists.

        A shard that this trainer has closed does not count: the next shard of this name is created once all have closed
        this one.
        """
        if self._shard is None or self.role is not ShardRole.PRIMARY or trainer in self._shard.left:
            return _WAIT
        spec = self._shard.spec
        if described != spec.described:
            calls = {self._rank(spec.trainers[0]): spec.described, self._rank(trainer): described}
            raise MismatchError(
                f"ParameterServer {spec.name!r}: trainers have made it with different arguments:\n"
                f"  {spec.trainers[0]}: {spec.described}\n  {trainer}: {described}\nGive all of them the same.",
                calls=calls,
            )
        self._known_losses[trainer] = {self._shard.workers.get(one) for one in self._lost_trainers(self._shard)}
        answer = self._shard.clocks[trainer], self._shard.load_number
        if self._shard.workers.get(trainer) == worker:
            return answer
        self._load_requests.pop(trainer, None)  # a request of the worker that this worker replaces
        return self._answer_after(self.write(("attach", trainer, worker)), answer)

    def request_load(self, trainer: str, number: int) -> None:
        """Record that the trainer has nothing more to push before load `number`."""
        with self._lock:
            self._load_requests[trainer] = number

    def load(self, trainer: str, number: int, state: State | None) -> Any:
        """Load the first trainer's state once all have requested load `number`: a late trainer may still push."""
        shard = self._find_shard()
        if shard is None:
            return _WAIT
        if shard.load_number >= number:
            return shard.clocks[trainer], shard.options()
        lost = self._lost_trainers(shard)
        if state is None or any(self._load_requests.get(one, 0) < number for one in shard.active() if one not in lost):
            if (first := shard.spec.trainers[0]) in lost:
                raise TrainerLostError(
                    f"ParameterServer {shard.spec.name!r}: trainer {first!r} is lost, and its state cannot be loaded: "
                    f"{lost[first]}",
                    ranks=(self._rank(first),),
                )
            if first in shard.left:
                raise ClosedError(
                    f"ParameterServer {shard.spec.name!r}: trainer {first!r} has closed it, and its state cannot be "
                    "loaded. Let the first trainer load before it closes, or make another ParameterServer without it."
                )
            return _WAIT
        acknowledged = self.write(("load", number, state))
        return self._answer_after(acknowledged, (shard.clocks[trainer], shard.options()))

    @staticmethod
    def _answer_after(acknowledged: Future[Any] | None, answer: Any) -> Any:
        """Return `answer`, or a future of it if the replica has yet to acknowledge the entry."""
        if acknowledged is None:
            return answer
        answered: Future[Any] = Future()
        acknowledged.add_done_callback(partial(forward_result, answered, value=answer))
        return answered

    def add(
        self,
        trainer: str,
        clock: int,
        number: int,
        kind: str,
        group: Group,
        values: Mapping[str, Tensor],
        described: str,
    ) -> Any:
        """Add a group with the values of the first remaining trainer, once its last step is applied."""
        shard = self._find_shard()
        if shard is None:
            return _WAIT
        first = shard.active()[0]
        if number < len(shard.added()):
            if shard.added()[number] != (kind, described):
                raise MismatchError(
                    f"ParameterServer {shard.spec.name!r}: trainers have added different groups:\n  {first}: "
                    f"{shard.added()[number][1]}\n  {trainer}: {described}\nAdd the same in the same order on all.",
                    calls={self._rank(first): shard.added()[number][1], self._rank(trainer): described},
                )
            return None
        lost = self._lost_trainers(shard)
        if first in lost:
            raise TrainerLostError(
                f"ParameterServer {shard.spec.name!r}: trainer {first!r} is lost, and its group cannot be added: "
                f"{lost[first]}",
                ranks=(self._rank(first),),
            )
        if not self._may_continue(shard, trainer, clock) or trainer != first:
            return _WAIT
        return self.write(("add", number, kind, group, values, described))

    def push(self, trainer: str, clock: int, gradients: PushedGradients) -> Any:
        """Apply a trainer's gradients once the trainer may continue; so a trainer that never pulls is limited, too."""
        shard = self._find_shard()
        if shard is None or (clock >= shard.clocks[trainer] and not self._may_continue(shard, trainer, clock)):
            return _WAIT
        return self.write(("push", trainer, clock, gradients))

    def norms(self, trainer: str, clock: int) -> Any:
        """Return the norms of this shard's gradients for synchronous step `clock`, once all have pushed them."""
        shard = self._find_shard()
        if shard is None:
            return _WAIT
        waits = shard.step == clock and shard.is_complete() and self._failure is None
        if not waits and not self._may_continue(shard, trainer, clock + 1):
            return _WAIT
        return shard.norms()

    def write(self, entry: tuple[Any, ...]) -> Any:
        """Apply the entry on this server and on the replica."""
        shard = self._find_shard()
        if shard is None:
            return _WAIT
        before = self._failure
        self._apply(shard, entry)
        acknowledged = None
        if self._replica is not None:  # also after a failure: later entries would wait on the replica for this number
            arguments = (self._name, self._index, self._number, entry)
            acknowledged = self._ack(self._send(self._replica, receive, arguments))
        if self._failure is not before and self._failure is not None:
            raise self._failure
        return acknowledged

    def _apply(self, shard: Shard, entry: tuple[Any, ...]) -> None:
        if entry[0] == "load":
            self._failure = None
        try:
            shard.apply(entry)
        except MismatchError as error:  # trainers have sent different options for a step; nothing was applied
            self._failure = error
        except Exception as error:  # an optimizer raised, here and on the replica; the step cannot be undone
            self._failure = PhalanxError(
                f"ParameterServer {shard.spec.name!r}: server {self._agent.me.info.name!r} could not make step "
                f"{shard.step}: {summary_of(error)}\nThe parameters are as the optimizer left them; resume "
                "from a checkpoint."
            )
            self._failure.__cause__ = error
        self._number += 1
        if not shard.active():  # all trainers have left: there will be no more requests
            self._shard, self._primary = None, None
            self._become(ShardRole.EMPTY)
            self._load_requests, self._failure = {}, None

    def pull(self, trainer: str, clock: int, dense: list[str], rows: Mapping[str, Tensor]) -> Any:
        """Return the values, and how many steps the slowest trainer is behind, once the trainer may continue."""
        shard = self._find_shard()
        if shard is None or not self._may_continue(shard, trainer, clock):
            return _WAIT
        return *shard.values(dense, rows), shard.staleness(clock, self._lost_trainers(shard))

    def state(self, trainer: str, clock: int, options: Mapping[str, Sequence[Options]] | None = None) -> Any:
        """Return the shard's complete state, once the step is complete, with the trainer's `options`."""
        shard = self._find_shard()
        if shard is None or not self._may_continue(shard, trainer, clock):
            return _WAIT
        return shard.state(options)

    def _may_continue(self, shard: Shard, trainer: str, clock: int) -> bool:
        if self._failure is not None:
            raise self._failure
        lost = self._lost_trainers(shard)
        if trainer in lost:
            raise TrainerLostError(f"trainer {trainer!r} is lost, and so is its request.")
        if not shard.spec.synchronous:
            bound = shard.spec.max_staleness
            return bound is None or shard.staleness(clock, lost) <= bound
        if shard.step >= clock:
            return True
        missing = {
            one: why for one, why in lost.items() if one in shard.behind() and not self._is_awaited(shard, one, trainer)
        }
        if missing:
            losses = "; ".join(f"trainer {one!r} is lost: {why}" for one, why in missing.items())
            raise TrainerLostError(
                f"ParameterServer {shard.spec.name!r}, synchronous step {shard.step}: {losses} It had not pushed its "
                "gradients; the step cannot be completed.\nResume from a checkpoint, with the remaining trainers.",
                ranks=tuple(self._rank(one) for one in missing),
            )
        return False

    def _lost_trainers(self, shard: Shard) -> dict[str, str]:
        """Return the trainers that have ended without leaving, and the reason for each."""
        found = {}
        for one in shard.active():
            worker = shard.workers.get(one)
            if why := self._why_lost(one) if worker is None else self._agent.why_lost(worker):
                found[one] = why
        return found

    def _is_awaited(self, shard: Shard, lost: str, trainer: str) -> bool:
        """Return whether `trainer` waits until the replacement of the trainer `lost` attaches.

        `trainer` waits if it attached after that loss, as the trainers of the next generation of an elastic job do. A
        trainer that attached earlier receives an error: the replacement waits for that trainer to join the group.
        """
        if shard.workers.get(lost) not in self._known_losses.get(trainer, ()):
            return False
        member = self._agent.membership.find(lost)
        if member is None or self._agent.peer(member).lost:
            return False
        if self._agent.peer(member).connection is None:
            on_thread(partial(self._agent.watch, [member]))
        return True

    def _why_lost(self, worker: str) -> str:
        membership = self._agent.membership
        member = membership.find(worker) or membership.find_lost(worker)
        return "" if member is None else self._agent.peer(member).lost

    def _rank(self, worker: str) -> int:
        membership = self._agent.membership
        member = membership.find(worker) or membership.find_lost(worker)
        return -1 if member is None else member.info.id

    def clocks(self) -> dict[str, int]:
        """Return how many steps each trainer has pushed."""
        return {} if self._shard is None else {one: self._shard.clocks[one] for one in self._shard.active()}

    # -- the replica ---------------------------------------------------------------------------------------------------

    def install(self, primary: int, number: int, snapshot: tuple[Any, ...], failure: str | None) -> None:
        """Become the replica with this state; `failure` is why the shard's contents are invalid, if they are."""
        with self._lock:
            if self.role is ShardRole.PRIMARY:
                raise NoCopyError("this server is the primary of the shard now.")
            self._become(ShardRole.REPLICA)
            self._shard, self._primary, self._number = Shard.from_snapshot(snapshot), primary, number
            self._failure = None if failure is None else PhalanxError(failure)
        self.receive(None, None)

    def receive(self, number: int | None, entry: tuple[Any, ...] | None) -> Future[Any]:
        """Apply the primary's entries in order; the future completes when this entry is applied."""
        future: Future[Any] = Future()
        applied = []
        with self._lock:
            if self.role is ShardRole.PRIMARY:  # the sender is lost, and has not acknowledged this entry to a trainer
                raise NoCopyError("this server is the primary of the shard now.")
            if number is not None and entry is not None:
                self._early_entries[number] = (entry, future)
            if self._shard is not None:
                # entries that the installed state already includes
                for old in [one for one in self._early_entries if one <= self._number]:
                    applied.append(self._early_entries.pop(old)[1])
                while self._shard is not None and self._number + 1 in self._early_entries:
                    next_entry, its_future = self._early_entries.pop(self._number + 1)
                    self._apply(self._shard, next_entry)
                    applied.append(its_future)
        for one in applied:
            one.set_result(None)
        return future

    def _choose_replica(self) -> None:
        """Send a copy to the next living server, preferably on another host."""
        assert self._shard is not None
        spec = self._shard.spec
        me = self._agent.me
        self._replica, self._installed = None, None
        if spec.replicate:
            after = ring(spec.servers, spec.servers.index(me.info.name), self._agent.membership.host_of)[1:]
            self._replica = next((one for one in after if not self._why_lost(one)), None)
        if self._replica is not None:
            failure = None if self._failure is None else str(self._failure)
            arguments = (self._name, self._index, me.uid, self._number, self._shard.snapshot(), failure)
            self._installed = self._send(self._replica, install, arguments)

    def _send(self, to: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        try:
            return rpc_async(to, function, arguments)
        except PhalanxError as error:  # the server is already known to be lost
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _ack(self, sent: Future[Any] | None) -> Future[Any] | None:
        """Return a future that completes when the replica, or the replica's successor, has acknowledged a message."""
        if sent is None:
            return None
        ack: Future[Any] = Future()
        sent.add_done_callback(partial(self._on_replica_answer, ack, self._replica))
        return ack

    def _on_replica_answer(self, ack: Future[Any], replica: str | None, sent: Future[Any]) -> None:
        try:
            sent.value()
        except PeerLostError:
            on_thread(partial(self._replace_replica, ack, replica))
        except Exception as error:
            ack.set_exception(error)
        else:
            ack.set_result(None)

    def _replace_replica(self, ack: Future[Any], replica: str | None) -> None:
        with self._lock:
            if self._replica == replica:
                self._choose_replica()
            next_one = self._ack(self._installed)
        if next_one is None:
            ack.set_result(None)
        else:
            next_one.add_done_callback(partial(forward_result, ack))

    def on_lost(self, member: WorkerAddress) -> None:
        """Replace a lost primary, choose another replica, or fail the requests that wait for a lost trainer."""
        with self._lock:
            if self.role is ShardRole.REPLICA and self._primary == member.uid:
                self._become(ShardRole.PRIMARY)
                self._early_entries.clear()  # an earlier one is missing, and trainers got no acknowledgement of these
                self._choose_replica()
            elif self.role is ShardRole.PRIMARY and self._replica == member.info.name:
                self._choose_replica()
        self.answer_requests()


_registry = threading.Lock()
_hosted: dict[
    int, dict[tuple[str, int], HostedShard]
] = {}  # by the agent's uid: a process may be several workers in turn


def host(name: str, index: int) -> HostedShard:
    """Return the `HostedShard` for this shard on this worker."""
    agent = current.agent()
    uid = agent.me.uid
    with _registry:
        if uid not in _hosted:
            _hosted[uid] = {}
            agent.on_lost.append(partial(_notify_places, agent))
            agent.on_close.append(lambda: _forget(uid))
        places = _hosted[uid]
        if (name, index) not in places:
            places[name, index] = HostedShard(agent, name, index)
        return places[name, index]


def _forget(uid: int) -> None:
    with _registry:
        _hosted.pop(uid, None)


def _notify_places(agent: Agent, member: WorkerAddress) -> None:
    if agent.is_leaving:  # all workers are leaving
        return
    with _registry:
        places = list(_hosted.get(agent.me.uid, {}).values())
    for place in places:
        on_thread(partial(place.on_lost, member))


def install(name: str, index: int, primary: int, number: int, snapshot: tuple[Any, ...], failure: str | None) -> None:
    """Install a copy of the shard from its primary."""
    host(name, index).install(primary, number, snapshot, failure)


@async_execution
def receive(name: str, index: int, number: int, entry: tuple[Any, ...]) -> Future[Any]:
    """Apply an entry of the primary."""
    return host(name, index).receive(number, entry)


def forward_result(future: Future[Any], done: Future[Any], value: Any = None) -> None:
    """Complete `future` with the outcome of `done`, or with `value` instead of its result."""
    try:
        result = done.value()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result if value is None else value)


def on_thread(work: Callable[[], None]) -> None:
    """Call `work` in a new thread, because the reader must not wait."""

    def run() -> None:
        try:
            work()
        except ClosedError:  # this worker is ending, too
            pass

    threading.Thread(target=run, name="phalanx-parameter-server", daemon=True).start()
