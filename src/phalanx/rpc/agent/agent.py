"""An `Agent` makes this process a worker, which calls other workers and runs their calls.

Which thread reads what:

    The reader, one thread per worker, reads all connections. It sets the futures of `rpc_async` itself; pool threads
    run the functions that other workers call, and the callbacks of answers.
    A thread that waits at once, as in `rpc_sync`, acquires a line of its own to the callee, and reads its answer there.
    At the other end of the line one thread reads the calls, runs them, and answers.

    caller                                              callee
    rpc_async: pickle, count the call, send
                        -- REQUEST or REMOTE -->        the reader reads it
                                                        a thread runs the function
                        <-- REPLY or ERROR --           pickles the result, sends
    the reader reads it, and sets the future

    rpc_sync: the same     == REQUEST ==>               the line's thread reads it, runs the function,
    the thread reads it    <== REPLY or ERROR ==        pickles the result, sends

A call that finds no idle line uses the connection, and a line is opened for later calls. The connection also carries
calls to another host or to this worker itself, and calls of a thread that must not read its answer, because a torch
mode would change the answer or a signal handler that raises would interrupt the read.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from phalanx._base.log import get_logger
from phalanx._base.threads import join_all
from phalanx._comm.control.key import Key
from phalanx.errors import ClosedError, PhalanxError
from phalanx.rpc import wire
from phalanx.rpc.agent import interrupts
from phalanx.rpc.agent.answer import Answer, LineAnswer
from phalanx.rpc.agent.answer_reader import AnswerReader, is_in_mode
from phalanx.rpc.agent.answer_sender import AnswerSender
from phalanx.rpc.agent.calls import Call, Callee, count, describe_timeout, why_failed
from phalanx.rpc.agent.connections import Connections
from phalanx.rpc.agent.incoming_call import IncomingCall
from phalanx.rpc.agent.pool import CallLimit, ThreadPool
from phalanx.rpc.agent.reader import ConnectionReader, this_thread
from phalanx.rpc.agent.state import TRANSITIONS, AgentState
from phalanx.rpc.call_hook import call_hook
from phalanx.rpc.collector import without_collector
from phalanx.rpc.line import CalleeLine, CallerLine, LinePool, open_line
from phalanx.rpc.options import UNSET_RPC_TIMEOUT, RpcBackendOptions, seconds_of
from phalanx.rpc.references import References
from phalanx.rpc.serialization import serialize, serialize_call
from phalanx.rpc.wire import Frame
from phalanx.rpc.worker_info import WorkerAddress
from phalanx.rpc.workers import Workers

_logger = get_logger(__name__)
_TICK_S = 1.0  # the reader's period while calls are in flight
_JOIN_S = 0.2
_LAST_S = 5.0  # how long `close` waits for the user's callbacks


class Agent:
    """An `Agent` is a worker: it calls others, runs their calls, and answers."""

    def __init__(self, name: str, number: int, host: str, options: RpcBackendOptions) -> None:
        self.options = options
        self.default_timeout_s = options.rpc_timeout
        self.state = AgentState.STARTING
        self._answer_sender = answer_sender = AnswerSender(self)
        self.controls, self.orders = answer_sender.controls, answer_sender.orders
        self.answer, self.answer_order = answer_sender.answer, answer_sender.answer_order
        self._answers = AnswerReader(self)
        self.on_lost: list[Callable[[WorkerAddress], None]] = []
        self.on_close: list[Callable[[], None]] = []
        self.call_limit = CallLimit(options.num_worker_threads)
        self.functions = ThreadPool("phalanx-rpc-call", options.num_worker_threads, answer_sender.flush)
        self.threads = ThreadPool("phalanx-rpc-work")  # no limit: callbacks and orders may wait for one another
        self.reader = ConnectionReader(self._handle, self.threads.put, self._relieve, self._tick)
        self.connections = Connections(name, number, host, options, self.reader, self._lose)
        self.me = self.connections.me
        self.peers = self.connections.peers
        self.peer, self.why_lost = self.connections.peer, self.connections.why_lost
        self.references = References(self.me.uid)
        self.membership: Workers
        self.num_calls = 0
        self.termination: Any = None
        self._early_frames: deque[tuple[Any, Frame]] = deque()
        self._callee_lines: list[CalleeLine] = []
        self.controls["goodbye"] = self._on_goodbye

    def start(self, membership: Workers) -> None:
        """Start to serve and to call."""
        self.membership = membership
        self.connections.start(membership)
        self.reader.start()

    def become(self, state: AgentState) -> None:
        """Change the state."""
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.state = state

    @property
    def closed(self) -> bool:
        """Return whether this worker makes no more calls."""
        return self.state is AgentState.ENDING or self.state is AgentState.CLOSED

    @property
    def is_leaving(self) -> bool:
        """Return whether this worker leaves with all others, or is closed."""
        return self.state is AgentState.LEAVING or self.closed

    def open_for_calls(self) -> None:
        """Serve requests from now on, first those received earlier. Call this after `current.set_agent`."""
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
        """Send `obj` to a worker in a frame of `kind`; return the `Answer`.

        With `is_awaited`, the answer may be a `LineAnswer`: this thread must then call its `wait` at once.

        Raises:
            ClosedError: this worker was shut down.
            Exception: pickling raised it.
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
            interrupts.allow(may_raise=call.line_answer is None)  # `LineAnswer.wait` raises KeyboardInterrupt
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
        """Send a call. If the worker is lost, fail the call and return False."""
        peer = self.peer(to)
        connection = peer.connection or self.connections.connect(peer, call.timeout_s)
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
            peer.remove(call.number)  # nobody waits for it
            if call.line_answer is not None:
                call.line_answer.close()
            raise
        if (peer.is_lost() or self.closed) and call.claim():  # otherwise another thread has claimed and failed it
            call.fail(why_failed(peer, call))
        return True

    def _line_for(self, connection: Any) -> CallerLine | None:
        """Return a line for a call of this thread; None if there is none or this thread must not read."""
        lines: LinePool | None = connection.lines
        if lines is None or this_thread.read_more is not None or interrupts.may_raise() or is_in_mode():
            return None
        return lines.acquire()

    @without_collector
    def _write(self, connection: Any, kind: int, number: int, data: Any, extras: bytes, buffers: Sequence[Any]) -> None:
        if interrupts.may_raise():
            connection.put(kind, number, data, extras, buffers)
            self._answer_sender.send_later(connection)
        else:
            connection.send(kind, number, data, extras, buffers)

    def control(self, to: WorkerAddress, name: str, argument: Any, timeout_s: float = UNSET_RPC_TIMEOUT) -> Answer[Any]:
        """Call the control `name` of a worker, and return the future of its result."""
        return self.invoke(  # type: ignore[no-any-return]
            to, "rpc", name, (name, argument), timeout_s, kind=wire.CONTROL
        )

    def notify(self, to: WorkerAddress, name: str, argument: Any) -> None:
        """Call the control `name` of a worker without an answer; do nothing for a lost worker."""
        connection = self._connect(to)
        if connection is not None:
            payload = serialize((name, argument), to)
            connection.send(wire.CONTROL, 0, payload.data, b"", payload.buffers)

    def watch(self, members: Iterable[WorkerAddress]) -> None:
        """Connect to these workers: the exit of a worker without a connection would go unnoticed."""
        for one in members:
            if self.peer(one).connection is None:
                self.notify(one, "watch", None)

    def _connect(self, to: WorkerAddress) -> Any:
        """Return the connection to a worker; None if the worker is lost, or not connected and this agent is closed."""
        peer = self.peer(to)
        return peer.connection or (None if self.closed else self.connections.connect(peer))

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
        """Send an order in bytes. This thread must wait for the answer; `read` converts the answer to the result."""
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

    def send_order(self, to: WorkerAddress, data: bytes, buffers: Sequence[Any]) -> None:
        """Send an order in bytes without an answer; do nothing for a lost worker."""
        connection = self._connect(to)
        if connection is not None:
            connection.send(wire.ORDER, 0, data, b"", buffers)

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Handle the frames that were received before this agent was open, in order of arrival, before later ones."""
        if self.state is AgentState.STARTING:
            self.become(AgentState.RUNNING)
        while self._early_frames:
            self._handle(*self._early_frames.popleft())

    def _handle(self, connection: Any, frame: Frame) -> None:
        """Handle a received frame, in the reader."""
        kind = frame.kind
        if kind == wire.REPLY or kind == wire.ERROR:
            peer = self.peers.get((connection.peer or self.me).uid)
            self._answers.complete(connection, frame, peer.remove(frame.call) if peer is not None else None)
        elif self.state is AgentState.STARTING:
            self._early_frames.append((connection, frame))
        elif kind == wire.REQUEST or kind == wire.REMOTE:
            self.functions.put(partial(IncomingCall(self, connection, frame).run, self.call_limit, self._num_waiting))
        elif kind == wire.ORDER and not frame.call:
            self._answer_sender.handle_order(connection, frame)
        elif kind == wire.ORDER:
            self.threads.put(partial(self._answer_sender.handle_order, connection, frame))
        elif kind == wire.CONTROL:
            self._answer_sender.handle_control(connection, frame)
        elif kind == wire.FETCH:
            self.threads.put(partial(self._answer_sender.handle_fetch, connection, frame))
        elif kind == wire.LINE:
            self._handle_line(connection, frame)

    def _num_waiting(self) -> int:
        return self.functions.num_waiting

    def _handle_line(self, connection: Any, frame: Frame) -> None:
        """Open the line that a caller requests, or handle the answer to this worker's request for a line."""
        if connection.lines is not None:
            connection.lines.opened(frame.call, bool(frame.data))
        elif not self.closed and (line := open_line(connection, frame.call, self._serve)) is not None:
            self._callee_lines = [one for one in self._callee_lines if one.thread.is_alive()] + [line]

    def _serve(self, line: CalleeLine, frame: Frame) -> None:
        """Handle a frame received over a line, in the line's own thread."""
        if frame.kind == wire.ORDER:
            self._answer_sender.handle_order(line, frame)
        elif frame.kind == wire.FETCH:
            self._answer_sender.handle_fetch(line, frame)
        else:
            IncomingCall(self, line, frame).run(self.call_limit, _none_waiting)

    def receive(self, connection: Any, frame: Frame, call: Call) -> tuple[Any, Callable[[], BaseException] | None]:
        """Return the result in an answer, or the function that makes its error."""
        return self._answers.receive(connection, frame, call)

    def abandon_answer(self, line: CallerLine, call: Call) -> None:
        """Transfer to the reader an answer that no thread waits for any longer."""
        self.reader.put(_LateAnswer(self, line, call).begin)

    def drop_late(self, connection: Any, frame: Frame) -> None:
        """Drop an answer that was received too late, and the references in it."""
        self._answers.complete(connection, frame, None)

    def receive_forks(self, forks: Any) -> list[Any]:
        """Return the references received with a call, as RRefs. If one cannot be made, the others are released."""
        return self._answers.receive_forks(forks)

    make_rref: Callable[..., Any]  # `rref` sets it

    # -- lost workers --------------------------------------------------------------------------------------------------

    def _on_goodbye(self, member: WorkerAddress, why: Any) -> None:
        self.connections.lose_after_reading(member, str(why))

    def _lose(self, peer: Callee) -> None:
        """Call the `on_lost` callbacks for a lost worker, then fail the calls to it."""
        for callback in list(self.on_lost):
            callback(peer.member)
        self._fail_all(peer)

    def _fail_all(self, peer: Callee) -> None:
        for call in peer.remove_all():
            call.fail(why_failed(peer, call))

    def release_later(self, objects: list[Any]) -> None:
        """Release the user's objects, whose finalizers may wait, in a thread other than the reader."""
        if objects:
            self.threads.put(objects.clear)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _relieve(self) -> bool:
        """Wake more threads if some are stuck, and send the queued answers; return whether to call this again."""
        self._answer_sender.flush()
        is_busy = self.functions.relieve()
        return self.threads.relieve() or is_busy or self._answer_sender.has_more

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
        """Notify owners of the references that were dropped."""
        dropped = self.references.dropped
        by_owner: dict[int, list[Any]] = {}
        while dropped:
            owner, rref_id, fork = dropped.popleft()
            by_owner.setdefault(owner, []).append((rref_id, fork))
        for owner, forks in by_owner.items():
            member = self.membership.by_uid(owner)
            if member is not None and not self.peer(member).lost:
                try:
                    self.notify(member, "drop_forks", forks)
                except PhalanxError:  # no descriptor is free for a connection: a later tick tries again
                    self.references.dropped.extend((owner, *one) for one in forks)

    @property
    def num_in_flight(self) -> int:
        """Return how many calls of this worker wait for an answer."""
        return count(list(self.peers.values()))

    # -- the end -------------------------------------------------------------------------------------------------------

    def open_network(self, address: str, key: Key) -> None:
        """Accept workers on other hosts that have the key, and add the network address to `me`."""
        self.connections.open_network(address, key)
        self.me = self.connections.me

    def abandon(self) -> None:
        """Close the sockets in a forked child of this worker, without effect on the parent."""
        self.state = AgentState.CLOSED
        self.connections.abandon()

    def close(self, why: str) -> None:
        """Stop being a worker: calls in flight fail, connections are closed."""
        if self.closed:
            return
        self._send_drops()
        for peer in list(self.peers.values()):
            if peer.connection is not None and peer.member.uid != self.me.uid and self.state is not AgentState.LEAVING:
                self.notify(peer.member, "goodbye", why)
        self.become(AgentState.ENDING)
        self.connections.keep_members()
        self.call_limit.close()
        self.functions.close()
        self.reader.close()
        for peer in list(self.peers.values()):
            self.reader.put(partial(self._fail_all, peer))
        for callback in self.on_close:
            self.reader.put(callback)
        self.threads.finish(_LAST_S)  # a callback may wait for another call, or for the `on_close` callbacks
        self.threads.close()
        self.connections.close()
        join_all([line.thread for line in self._callee_lines], _JOIN_S)  # a line's thread may be in the user's code
        self.reader.release()
        self.become(AgentState.CLOSED)
        for owned in self.references.clear():
            del owned


class _LateAnswer:
    """A `_LateAnswer` is an answer that no thread waits for any longer: the reader reads it and releases the line."""

    def __init__(self, agent: Agent, line: CallerLine, call: Call) -> None:
        self._agent = agent
        self._line = line
        self._call = call

    def begin(self) -> None:
        if self._line.lines.transfer(self._line):
            self._agent.reader.watch(self._line.fd, self)

    def ready(self, events: int) -> None:
        """Read the answer."""
        frames = self._line.read()
        if frames is None or frames:
            self._call.claim()
            self._agent.reader.forget(self._line.fd)
            self._line.lines.release(self._line, is_over=frames is None)
        for frame in frames or ():
            self._agent.drop_late(self._line, frame)


def _none_waiting() -> int:
    return 0
