"""The agent is this process as a worker, which calls others and is called.

caller                                             callee
invoke: pickle, count the call, send
                        -- REQUEST or REMOTE -->   the leader reads it
                                                   a thread runs the function
                        <-- REPLY or ERROR --      pickles the result, sends
the leader reads it, the future has it
"""

from __future__ import annotations

import math
import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from phalanx._base.deadline import join_all
from phalanx._base.log import get_logger
from phalanx._base.torch_names import find
from phalanx._comm.control.key import Key
from phalanx.errors import ClosedError, PhalanxError
from phalanx.rpc import wire
from phalanx.rpc.agent import interrupts
from phalanx.rpc.agent.answering import Answering
from phalanx.rpc.agent.calls import Call, Callee, count, describe_timeout, why_failed
from phalanx.rpc.agent.completing import Completing
from phalanx.rpc.agent.connections import Connections
from phalanx.rpc.agent.reading import Answer
from phalanx.rpc.agent.request import Request
from phalanx.rpc.agent.serving import Lead, Serving, Task
from phalanx.rpc.agent.threads import Threads
from phalanx.rpc.call_hook import call_hook
from phalanx.rpc.collector import without_collector
from phalanx.rpc.options import UNSET_RPC_TIMEOUT, RpcBackendOptions, seconds_of
from phalanx.rpc.references import References
from phalanx.rpc.remote_error import set_error
from phalanx.rpc.serialization import serialize, serialize_call
from phalanx.rpc.wire import Frame
from phalanx.rpc.worker_info import WorkerAddress
from phalanx.rpc.workers import Workers

_Future: Any = find("torch._C.Future", loses="phalanx.rpc does not work")

_logger = get_logger(__name__)
_TICK_S = 1.0  # the clock ticks so often while calls are under way
_CONNECT_S = 30.0
_LAST_S = 5.0  # for what the end of this worker runs of the user's


class Agent:
    """It is a worker, which calls others, has their requests carried out, and answers."""

    def __init__(self, name: str, number: int, host: str, options: RpcBackendOptions) -> None:
        self.options = options
        self.default_timeout_s = options.rpc_timeout
        self._answering = answering = Answering(self)
        self.controls, self.orders = answering.controls, answering.orders
        self.answer, self.answer_order = answering.answer, answering.answer_order
        self._completing = Completing(self, answering)
        self.on_lost: list[Callable[[WorkerAddress], None]] = []
        self.on_close: list[Callable[[], None]] = []
        self.serving = Serving(options.num_worker_threads, self._handle, answering.flush, self._tick)
        take = self._completing.take_back
        self.connections = Connections(name, number, host, options, self.serving, take, self._lose)
        self.me = self.connections.me
        self.peers = self.connections.peers
        self.peer, self.why_lost = self.connections.peer, self.connections.why_lost
        self.threads = Threads("phalanx-rpc-work")
        self.references = References(self.me.uid)
        self.membership: Workers
        self.closed = False
        self.closing = False  # others may go now without being lost
        self.num_calls = 0
        self.termination: Any = None
        self._is_over = False  # nobody leads any more
        self._last: list[threading.Thread] = []
        self._is_open = False
        self._early: deque[tuple[Any, Frame]] = deque()
        self.controls["goodbye"] = self._hear_goodbye

    def start(self, membership: Workers) -> None:
        """Serve, and call."""
        self.membership = membership
        self.connections.start(membership)
        self.serving.start()

    def open_for_calls(self) -> None:
        """From here on carry out what others ask, and first what they have asked too early: `current` knows us now."""
        self.serving.put(Task(self._open))

    # -- calling -------------------------------------------------------------------------------------------------------

    def invoke(
        self,
        to: WorkerAddress,
        what: str,
        name: str,
        obj: Any,
        timeout_s: float = UNSET_RPC_TIMEOUT,
        *,
        kind: int = wire.REQUEST,
        rref: Any = None,
        on_answer: Callable[[Any], Any] | None = None,
        is_awaited: bool = False,
    ) -> Answer[Any]:
        """Send `obj` to a worker, as `kind`; the answer comes in the future. Raises what pickling raises.

        `is_awaited`: the caller waits for it at once.

        Raises:
            ClosedError: this worker was shut down.
        """
        if self.closed:
            raise ClosedError(f"{what}({name}) to {to}: this worker was shut down.")
        payload = (serialize_call if kind == wire.REQUEST or kind == wire.REMOTE else serialize)(obj, to)
        hook = call_hook()
        note = hook.on_request(to, payload) if hook is not None and kind != wire.CONTROL else None
        extras = b""
        if payload.forks or rref is not None or note is not None:
            extras = pickle.dumps((payload.forks or None, rref, note), 5)
        call = Call(what, name, seconds_of(timeout_s, self.default_timeout_s), payload.kept)
        call.on_answer = on_answer
        interrupts.defer()
        try:
            buffers = payload.buffers
            nbytes = payload.nbytes if buffers else 0
            if not self._send(to, call, kind, payload.data, extras, buffers, nbytes, is_awaited):
                payload.revoke()
        except BaseException:
            payload.revoke()
            raise
        finally:
            interrupts.allow()
        return call.future

    def _send(
        self,
        to: WorkerAddress,
        call: Call,
        kind: int,
        data: Any,
        extras: bytes,
        buffers: Sequence[Any],
        nbytes: int,
        is_awaited: bool,
    ) -> bool:
        """Send a call; return False if it has failed instead."""
        peer = self.peer(to)
        if peer.lost:
            self._fail(peer, call)
            return False
        connection = peer.connection or self._connect(peer, call)
        if connection is None:
            return False
        reading = call.future.reading = connection.reading
        waits = kind == wire.REQUEST or kind == wire.REMOTE
        try:
            peer.add(call, nbytes, waits=waits)
            if call.deadline < self.serving.due:
                self.serving.wake_clock(call.deadline)
            if kind != wire.CONTROL and kind != wire.ORDER:
                self.num_calls += 1
            self._write(connection, kind, call.number, data, extras, buffers)
        except BaseException:
            peer.take(call.number)  # nobody waits for it
            raise
        if reading is not None and not is_awaited:
            reading.sent()
        if (peer.is_lost() or self.closed) and peer.take(call.number) is not None:  # else who failed all others had it
            self._fail(peer, call)
        return True

    @without_collector
    def _write(self, connection: Any, kind: int, number: int, data: Any, extras: bytes, buffers: Sequence[Any]) -> None:
        if interrupts.may_raise():
            connection.put(kind, number, data, extras, buffers)
            self._answering.send_later(connection)
        else:
            connection.send(kind, number, data, extras, buffers)

    def control(self, to: WorkerAddress, name: str, argument: Any, timeout_s: float = UNSET_RPC_TIMEOUT) -> Answer[Any]:
        """Ask something of a worker itself."""
        return self.invoke(to, "rpc", name, (name, argument), timeout_s, kind=wire.CONTROL)

    def tell(self, to: WorkerAddress, name: str, argument: Any) -> None:
        """Send as `control` does, without an answer; a worker that is gone is not told."""
        peer = self.peer(to)
        connection = peer.connection
        if connection is None and not peer.lost and not self.closed:
            connection = self._connect(peer, Call("rpc", name, _CONNECT_S))
        if connection is not None:
            payload = serialize((name, argument), to)
            connection.send(wire.CONTROL, 0, payload.data, b"", payload.buffers)

    def _connect(self, peer: Callee, call: Call) -> Any:
        """Return the connection to a worker; None if there can be none: the call has failed."""
        connection = self.connections.connect(peer, call.timeout_s)
        if connection is None:
            self._fail(peer, call)
        return connection

    def order(
        self,
        to: WorkerAddress,
        what: str,
        data: bytes,
        buffers: Sequence[Any] = (),
        timeout_s: float = UNSET_RPC_TIMEOUT,
        *,
        read: Callable[[Frame], Any] | None = None,
    ) -> Answer[Any]:
        """Ask as `control` does, in bytes, and wait for the answer, of which `read` makes something."""
        if self.closed:
            raise ClosedError(f"{what} to {to}: this worker was shut down.")
        call = Call("rpc", what, seconds_of(timeout_s, self.default_timeout_s))
        call.read = read
        interrupts.defer()
        try:
            self._send(to, call, wire.ORDER, data, b"", buffers, 0, True)
        finally:
            interrupts.allow()
        return call.future

    def tell_order(self, to: WorkerAddress, data: bytes, buffers: Sequence[Any], *, back: bool) -> None:
        """Send as `tell` does, in bytes; with `back` the thread that waits for an answer of ours hears it."""
        peer = self.peer(to)
        connection = (peer.calls_us if back else None) or peer.connection
        if connection is None and not peer.lost and not self.closed:
            connection = self._connect(peer, Call("rpc", "order", _CONNECT_S))
        if connection is not None:
            connection.send(wire.ORDER, 0, data, b"", buffers)

    def _fail(self, peer: Callee, call: Call) -> None:
        call.fail(why_failed(peer, call))

    # -- what comes in -------------------------------------------------------------------------------------------------

    def _open(self, lead: Lead) -> None:
        """Take what has come too early, in the order in which it came, and before all that follows."""
        self._is_open = True
        while self._early:
            self._handle(*self._early.popleft(), lead)

    def _handle(self, connection: Any, frame: Frame, lead: Lead) -> None:
        """Take a frame that has come, in the thread that leads."""
        kind = frame.kind
        if not self._is_open and kind not in (wire.REPLY, wire.ERROR):
            self._early.append((connection, frame))
            return
        if kind == wire.REQUEST or kind == wire.REMOTE:
            self.serving.requests.append(Request(self, connection, frame))
        elif kind == wire.REPLY or kind == wire.ERROR:
            lead.enter_user_code()
            self._completing.complete(connection, frame, self._take_call(connection, frame), here=True)
        elif kind == wire.ORDER:
            self._answering.take_order(connection, frame)
        elif kind == wire.CONTROL:
            self._answering.take_control(connection, frame)
        elif kind == wire.FETCH:
            self._answering.take_fetch(connection, frame)

    def _take_call(self, connection: Any, frame: Frame) -> Call | None:
        """Return the call that this is the answer of; it waits no more."""
        peer = self.peers.get((connection.peer or self.me).uid)
        return peer.take(frame.call) if peer is not None else None

    def take_forks(self, forks: Any) -> list[Any]:
        """Return the references that came with a call, as RRefs. Where one cannot be made, the others are let go of."""
        return self._completing.take_forks(forks)

    make_rref: Callable[..., Any]  # set by `rref`

    # -- the end of others ---------------------------------------------------------------------------------------------

    def _hear_goodbye(self, member: WorkerAddress, why: Any) -> None:
        self.connections.lose_after_reading(member, str(why))

    def _lose(self, peer: Callee) -> None:
        """Let go of what a worker held that is gone, and fail the calls to it, one after the other."""
        for hear in list(self.on_lost):
            hear(peer.member)
        self._fail_all(peer)

    def _fail_all(self, peer: Callee) -> None:
        for call in peer.take_all():
            self._completing.settle(call, partial(set_error, call.future, why_failed(peer, call)))

    def run_later(self, work: Callable[[], None]) -> None:
        """Let the leader do something that may run callbacks of the user; it must not raise."""

        def run(lead: Lead) -> None:
            lead.enter_user_code()
            work()

        self.serving.put(Task(run, at_end=partial(self._run_last, work)))
        if self._is_over:
            self._hand_out_last()

    # -- time ----------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> float:
        self.connections.send_releases()
        self.connections.listener.resume()
        self._send_drops()
        due = math.inf
        for peer in list(self.peers.values()):
            late, next_one = peer.expire(now)
            due = min(due, next_one)
            for call in late:
                self.run_later(partial(call.fail, partial(describe_timeout, *call.described, peer.member)))
        again = self.references.dropped or any(peer.calls for peer in list(self.peers.values()))
        return min(due, now + _TICK_S) if again else due

    def _send_drops(self) -> None:
        """Tell owners which references are gone."""
        dropped = self.references.dropped
        by_owner: dict[int, list[Any]] = {}
        while dropped:
            owner, rref_id, fork = dropped.popleft()
            by_owner.setdefault(owner, []).append((rref_id, fork))
        for owner, forks in by_owner.items():
            member = self.membership.by_uid(owner)
            if member is not None and not self.peer(member).lost:
                try:
                    self.tell(member, "drop_forks", forks)
                except PhalanxError:  # no descriptor is free for a connection: at a later tick there may be one
                    self.references.dropped.extend((owner, *one) for one in forks)

    @property
    def num_in_flight(self) -> int:
        """Return how many calls of ours wait for an answer."""
        return count(list(self.peers.values()))

    # -- the end -------------------------------------------------------------------------------------------------------

    def open_network(self, address: str, key: Key) -> None:
        """Let workers of other hosts in, who know the key; `me` says where from now on."""
        self.connections.open_network(address, key)
        self.me = self.connections.me

    def abandon(self) -> None:
        """Let go of the sockets, in a fork of this worker, and of nothing that is shared with it."""
        self.closed = True
        self.connections.abandon()

    def _hand_out_last(self) -> None:
        """Take what comes in when nobody leads any more: answers, and calls that are to fail.

        What may run code of the user's does so in a thread of its own: it may wait for one of the other calls.
        """
        incoming = self.serving.incoming
        while incoming:
            try:
                item = incoming.popleft()
            except IndexError:  # another thread was faster
                return
            if isinstance(item, Task):
                if item.at_end is not None:
                    item.at_end()
                continue
            connection, frame = item
            if frame.kind in (wire.REPLY, wire.ERROR):
                call = self._take_call(connection, frame)
                self._run_last(partial(self._completing.complete, connection, frame, call, here=True))

    def _run_last(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="phalanx-rpc-last", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends
            work()
        else:
            self._last.append(thread)

    def _join_last(self) -> None:
        """Wait for them, so long: one may wait for something that comes after the end of this worker."""
        join_all(list(self._last), _LAST_S)

    def close(self, why: str) -> None:
        """Be a worker no more: calls under way fail, connections are closed."""
        if self.closed:
            return
        self._send_drops()
        for peer in list(self.peers.values()):
            if peer.connection is not None and peer.member.uid != self.me.uid and not self.closing:
                self.tell(peer.member, "goodbye", why)
        self.closed = True
        self.connections.stop_to_learn()
        self.serving.close()
        self._is_over = True
        self._hand_out_last()
        for peer in list(self.peers.values()):
            self._fail_all(peer)
        self.threads.close()
        self._hand_out_last()
        for hear in self.on_close:
            hear()
        self._hand_out_last()
        self._join_last()
        self.connections.close()
        for owned in self.references.clear():
            del owned
