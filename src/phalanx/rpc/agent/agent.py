"""The agent is this process as a worker, which calls others and is called.

Who reads what:

    The reader, one thread of each worker, reads all its connections: it leaves the functions that others call, and the
    callbacks of answers, to threads of a pool, and sets the futures of `rpc_async` itself.
    A thread that waits at once, as in `rpc_sync`, takes a line of its own to the callee, and reads its answer there.
    At the other end of the line one thread reads its calls, runs them, and answers.

    caller                                              callee
    rpc_async: pickle, count the call, send
                        -- REQUEST or REMOTE -->        the reader reads it
                                                        a thread runs the function
                        <-- REPLY or ERROR --           pickles the result, sends
    the reader reads it, and sets the future

    rpc_sync: the same     == REQUEST ==>               the line's thread reads it, runs the function,
    the thread reads it    <== REPLY or ERROR ==        pickles the result, sends

A line is opened beside the first call that has none, which goes over the connection. So does a call to another host,
to this worker itself, or of a thread in which reading would be seen (a mode of torch) or torn (a handler that raises).
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from phalanx._base.deadline import join_all
from phalanx._base.log import get_logger
from phalanx._comm.control.key import Key
from phalanx.errors import ClosedError, PhalanxError
from phalanx.rpc import wire
from phalanx.rpc.agent import interrupts
from phalanx.rpc.agent.answer import Answer, LineAnswer
from phalanx.rpc.agent.answering import Answering
from phalanx.rpc.agent.calls import Call, Callee, count, describe_timeout, why_failed
from phalanx.rpc.agent.completing import Completing, is_in_mode
from phalanx.rpc.agent.connections import Connections
from phalanx.rpc.agent.pool import Pool, Room
from phalanx.rpc.agent.reader import Reader, this_thread
from phalanx.rpc.agent.request import Request
from phalanx.rpc.agent.state import TRANSITIONS, State
from phalanx.rpc.call_hook import call_hook
from phalanx.rpc.collector import without_collector
from phalanx.rpc.line import Line, Lines, ServedLine, open_line
from phalanx.rpc.options import UNSET_RPC_TIMEOUT, RpcBackendOptions, seconds_of
from phalanx.rpc.references import References
from phalanx.rpc.serialization import serialize, serialize_call
from phalanx.rpc.wire import Frame
from phalanx.rpc.worker_info import WorkerAddress
from phalanx.rpc.workers import Workers

_logger = get_logger(__name__)
_TICK_S = 1.0  # the reader ticks so often while calls are under way
_CONNECT_S = 30.0
_JOIN_S = 0.2
_LAST_S = 5.0  # for what the end of this worker runs of the user's


class Agent:
    """It is a worker, which calls others, has their requests carried out, and answers."""

    def __init__(self, name: str, number: int, host: str, options: RpcBackendOptions) -> None:
        self.options = options
        self.default_timeout_s = options.rpc_timeout
        self.state = State.STARTING
        self._answering = answering = Answering(self)
        self.controls, self.orders = answering.controls, answering.orders
        self.answer, self.answer_order = answering.answer, answering.answer_order
        self._completing = Completing(self)
        self.on_lost: list[Callable[[WorkerAddress], None]] = []
        self.on_close: list[Callable[[], None]] = []
        self.room = Room(options.num_worker_threads)
        self.functions = Pool("phalanx-rpc-call", options.num_worker_threads, answering.flush)
        self.threads = Pool("phalanx-rpc-work")  # for callbacks and orders, which may wait for each other
        self.reader = Reader(self._handle, self.threads.put, self._relieve, self._tick)
        self.connections = Connections(name, number, host, options, self.reader, self._lose)
        self.me = self.connections.me
        self.peers = self.connections.peers
        self.peer, self.why_lost = self.connections.peer, self.connections.why_lost
        self.references = References(self.me.uid)
        self.membership: Workers
        self.num_calls = 0
        self.termination: Any = None
        self._early: deque[tuple[Any, Frame]] = deque()
        self._served_lines: list[ServedLine] = []
        self.controls["goodbye"] = self._hear_goodbye

    def start(self, membership: Workers) -> None:
        """Serve, and call."""
        self.membership = membership
        self.connections.start(membership)
        self.reader.start()

    def become(self, state: State) -> None:
        """Go to another state."""
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.state = state

    @property
    def closed(self) -> bool:
        """Return whether this worker makes no more calls."""
        return self.state is State.ENDING or self.state is State.CLOSED

    @property
    def is_leaving(self) -> bool:
        """Return whether this worker leaves with all others, or has left."""
        return self.state is State.LEAVING or self.closed

    def open_for_calls(self) -> None:
        """From here on carry out what others ask, and first what they have asked too early: `current` knows us now."""
        self.reader.put(self._open)

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
    ) -> Any:
        """Send `obj` to a worker, as `kind`; return its `Answer`. Raises what pickling raises.

        `is_awaited`: this thread waits for it at once, by the answer's `wait` alone: it may be a `LineAnswer`.

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
            interrupts.allow(may_raise=call.line_answer is None)  # whoever waits for it hears of Ctrl-C
        return call.answer

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
        connection = None if peer.lost else peer.connection or self.connections.connect(peer, call.timeout_s)
        line = self._line_for(connection) if is_awaited and connection is not None else None
        if line is None:
            call.future = Answer()
        else:
            call.line_answer = LineAnswer(line, self, call)
        if connection is None:
            call.fail(why_failed(peer, call))
            return False
        try:
            peer.add(call, nbytes, waits=kind == wire.REQUEST or kind == wire.REMOTE)
            if call.deadline < self.reader.due:
                self.reader.wake_by(call.deadline)
            if kind != wire.CONTROL and kind != wire.ORDER:
                self.num_calls += 1
            if line is None:
                self._write(connection, kind, call.number, data, extras, buffers)
            else:
                line.send(kind, call.number, data, extras, buffers)
        except BaseException:
            peer.take(call.number)  # nobody waits for it
            if call.line_answer is not None:
                call.line_answer.close()
            raise
        if (peer.is_lost() or self.closed) and call.take():  # else who failed all others had it
            call.fail(why_failed(peer, call))
        return True

    def _line_for(self, connection: Any) -> Line | None:
        """Return a line for a call of this thread, in which reading would be neither seen nor torn; or None."""
        lines: Lines | None = connection.lines
        if lines is None or this_thread.read_more is not None or interrupts.may_raise() or is_in_mode():
            return None
        return lines.take()

    @without_collector
    def _write(self, connection: Any, kind: int, number: int, data: Any, extras: bytes, buffers: Sequence[Any]) -> None:
        if interrupts.may_raise():
            connection.put(kind, number, data, extras, buffers)
            self._answering.send_later(connection)
        else:
            connection.send(kind, number, data, extras, buffers)

    def control(self, to: WorkerAddress, name: str, argument: Any, timeout_s: float = UNSET_RPC_TIMEOUT) -> Answer[Any]:
        """Ask something of a worker itself."""
        return self.invoke(  # type: ignore[no-any-return]
            to, "rpc", name, (name, argument), timeout_s, kind=wire.CONTROL
        )

    def tell(self, to: WorkerAddress, name: str, argument: Any) -> None:
        """Send as `control` does, without an answer; a worker that is gone is not told."""
        peer = self.peer(to)
        connection = peer.connection
        if connection is None and not peer.lost and not self.closed:
            connection = self.connections.connect(peer, _CONNECT_S)
        if connection is not None:
            payload = serialize((name, argument), to)
            connection.send(wire.CONTROL, 0, payload.data, b"", payload.buffers)

    def order(
        self,
        to: WorkerAddress,
        what: str,
        data: bytes,
        buffers: Sequence[Any] = (),
        timeout_s: float = UNSET_RPC_TIMEOUT,
        *,
        read: Callable[[Frame], Any] | None = None,
    ) -> Answer[Any] | LineAnswer:
        """Ask as `control` does, in bytes; this thread waits for the answer, of which `read` makes something."""
        if self.closed:
            raise ClosedError(f"{what} to {to}: this worker was shut down.")
        call = Call("rpc", what, seconds_of(timeout_s, self.default_timeout_s))
        call.read = read
        interrupts.defer()
        try:
            self._send(to, call, wire.ORDER, data, b"", buffers, 0, True)
        finally:
            interrupts.allow(may_raise=call.line_answer is None)
        return call.answer

    def tell_order(self, to: WorkerAddress, data: bytes, buffers: Sequence[Any]) -> None:
        """Send as `tell` does, in bytes."""
        peer = self.peer(to)
        connection = peer.connection
        if connection is None and not peer.lost and not self.closed:
            connection = self.connections.connect(peer, _CONNECT_S)
        if connection is not None:
            connection.send(wire.ORDER, 0, data, b"", buffers)

    # -- what comes in -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Take what has come too early, in the order in which it came, and before all that follows."""
        if self.state is State.STARTING:
            self.become(State.RUNNING)
        while self._early:
            self._handle(*self._early.popleft())

    def _handle(self, connection: Any, frame: Frame) -> None:
        """Take a frame that has come, in the reader."""
        kind = frame.kind
        if kind == wire.REPLY or kind == wire.ERROR:
            peer = self.peers.get((connection.peer or self.me).uid)
            self._completing.complete(connection, frame, peer.take(frame.call) if peer is not None else None)
        elif self.state is State.STARTING:
            self._early.append((connection, frame))
        elif kind == wire.REQUEST or kind == wire.REMOTE:
            self.functions.put(partial(Request(self, connection, frame).run, self.room, self._num_waiting))
        elif kind == wire.ORDER and not frame.call:
            self._answering.take_order(connection, frame)
        elif kind == wire.ORDER:
            self.threads.put(partial(self._answering.take_order, connection, frame))
        elif kind == wire.CONTROL:
            self._answering.take_control(connection, frame)
        elif kind == wire.FETCH:
            self.threads.put(partial(self._answering.take_fetch, connection, frame))
        elif kind == wire.LINE:
            self._take_line(connection, frame)

    def _num_waiting(self) -> int:
        return self.functions.num_waiting

    def _take_line(self, connection: Any, frame: Frame) -> None:
        """Open the line that a caller has asked for, or use the one that we have asked for."""
        if connection.lines is not None:
            connection.lines.opened(frame.call, bool(frame.data))
        elif not self.closed and (line := open_line(connection, frame.call, self._serve)) is not None:
            self._served_lines = [one for one in self._served_lines if one.thread.is_alive()] + [line]

    def _serve(self, line: ServedLine, frame: Frame) -> None:
        """Carry out what has come over a line, in the line's own thread."""
        if frame.kind == wire.ORDER:
            self._answering.take_order(line, frame)
        elif frame.kind == wire.FETCH:
            self._answering.take_fetch(line, frame)
        else:
            Request(self, line, frame).run(self.room, _none_waiting)

    def receive(self, connection: Any, frame: Frame, call: Call) -> tuple[Any, Callable[[], BaseException] | None]:
        """Return the result that is in an answer, or what makes the error."""
        return self._completing.receive(connection, frame, call)

    def leave(self, line: Line, call: Call) -> None:
        """Have the reader read the answer that comes over a line for which nobody waits any more."""
        self.reader.put(_LateAnswer(self, line, call).begin)

    def complete_late(self, connection: Any, frame: Frame) -> None:
        """Drop what is in an answer that came too late."""
        self._completing.complete(connection, frame, None)

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
            call.fail(why_failed(peer, call))

    def release_later(self, objects: list[Any]) -> None:
        """Let go of objects of the user's, whose finalizers may wait, in a thread other than the reader."""
        if objects:
            self.threads.put(objects.clear)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _relieve(self) -> bool:
        """Have more threads work where some are stuck, and send what they put aside; return whether to look again."""
        self._answering.flush()
        is_busy = self.functions.relieve()
        return self.threads.relieve() or is_busy or self._answering.has_more

    def _tick(self, now: float) -> float:
        self.connections.send_releases()
        self.connections.listener.resume()
        self._send_drops()
        due = math.inf
        for peer in list(self.peers.values()):
            late, next_one = peer.expire(now)
            due = min(due, next_one)
            for call in late:
                call.fail(partial(describe_timeout, *call.described, peer.member))
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
        self.state = State.CLOSED
        self.connections.abandon()

    def close(self, why: str) -> None:
        """Be a worker no more: calls under way fail, connections are closed."""
        if self.closed:
            return
        self._send_drops()
        for peer in list(self.peers.values()):
            if peer.connection is not None and peer.member.uid != self.me.uid and self.state is not State.LEAVING:
                self.tell(peer.member, "goodbye", why)
        self.become(State.ENDING)
        self.connections.stop_to_learn()
        self.room.close()
        self.functions.close()
        self.reader.close()
        for peer in list(self.peers.values()):
            self.reader.put(partial(self._fail_all, peer))
        for hear in self.on_close:
            self.reader.put(hear)
        self.threads.finish(_LAST_S)  # a callback may wait for another call, or for what comes after the end
        self.threads.close()
        self.connections.close()
        join_all([line.thread for line in self._served_lines], _JOIN_S)  # not one that is in the user's code
        self.reader.release()
        self.become(State.CLOSED)
        for owned in self.references.clear():
            del owned


class _LateAnswer:
    """`_LateAnswer` is read by the reader, from the line of a thread that waits no more; then the line is free."""

    def __init__(self, agent: Agent, line: Line, call: Call) -> None:
        self._agent = agent
        self._line = line
        self._call = call

    def begin(self) -> None:
        if self._line.lines.leave(self._line):
            self._agent.reader.watch(self._line.fd, self)

    def ready(self, events: int) -> None:
        """Read what has come."""
        frames = self._line.read()
        if frames is None or frames:
            self._call.take()
            self._agent.reader.forget(self._line.fd)
            self._line.lines.put_back(self._line, is_over=frames is None)
        for frame in frames or ():
            self._agent.complete_late(self._line, frame)


def _none_waiting() -> int:
    return 0
