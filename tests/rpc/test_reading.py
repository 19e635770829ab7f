"""The reader reads all connections, and a thread that waits reads its own line; no stuck thread delays the others."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import types

import pytest
import torch
from tests.rpc.workers import (
    fail,
    join,
    nothing,
    pid,
    run_caller,
    run_workers,
    same,
    set_event,
    until,
    wait_event,
)
from tests.threads import map_in_threads

from phalanx import rpc
from phalanx.errors import DeadlineError, PeerLostError
from phalanx.rpc import current, serialization

_WAIT_S = 30.0


class Whereabouts:
    """Unpickled, it is the name of the thread that did it."""

    def __reduce__(self):
        return _thread_name, ()


def _thread_name():
    return threading.current_thread().name


def whereabouts():
    return Whereabouts()


def thread_name():
    return threading.current_thread().name


def _who_reads_and_runs():
    until(lambda: rpc.rpc_sync("w1", whereabouts) == "MainThread")  # once it has a line
    assert rpc.rpc_sync("w1", thread_name) == "phalanx-rpc-line"
    futures = [rpc.rpc_async("w1", whereabouts) for _ in range(200)]
    assert {one.wait() for one in futures} == {"phalanx-rpc-work"}
    assert rpc.rpc_async("w1", thread_name).wait() == "phalanx-rpc-call"


def _callbacks_keep_nobody_waiting():
    """The reader goes on, and so do other callbacks."""
    gate, entered = threading.Event(), threading.Event()

    def block(_):
        entered.set()
        assert gate.wait(_WAIT_S)

    future = rpc.rpc_async("w1", wait_event, ("go",))
    future.add_done_callback(block)
    rpc.rpc_sync("w1", set_event, ("go",))
    for number in range(20):
        assert rpc.rpc_sync("w1", same, (number,)) == number
    assert entered.wait(_WAIT_S)
    assert rpc.rpc_sync("w1", same, (1,)) == 1
    gate.set()
    assert future.wait() == "go"


_entered, _gate = threading.Event(), threading.Event()


class Stuck:
    """Unpickled, it waits."""

    def __init__(self, name=""):
        self.name = name

    def __reduce__(self):
        return _be_stuck, (self.name,)


def _be_stuck(name):
    _entered.set()
    assert _gate.wait(_WAIT_S)
    return name


def wait_event_and_stick(name):
    return Stuck(wait_event(name))


def _who_is_stuck_keeps_nobody_waiting():
    """While what an answer runs as it is unpickled blocks, others are answered."""
    first = rpc.rpc_async("w1", wait_event_and_stick, ("first",))
    rpc.rpc_async("w1", set_event, ("first",))
    assert _entered.wait(_WAIT_S)
    heard = first.then(lambda done: (done.value(), thread_name()))  # it waited, with what unpickling wanted in hand
    for number in range(20):
        assert rpc.rpc_sync("w1", same, (number,)) == number
        assert rpc.rpc_async("w1", same, (number,)).wait() == number
    _gate.set()
    assert first.wait() == "first"
    assert heard.wait() == ("first", "phalanx-rpc-work")


def _callbacks_do_not_run_in_a_thread_that_holds_what_they_want():
    """Those of `collect_all` ran in whatever thread read the answer, and those of a call in the one that waited for it:
    with a lock of the user's in hand that the callback took, both hung for good."""
    mine = threading.Lock()
    done = threading.Semaphore(0)

    def take_lock(_):
        with mine:
            done.release()

    for number in range(20):
        names = [f"one {number}", f"other {number}"]
        with mine:
            first, second = (rpc.rpc_async("w1", wait_event, (name,)) for name in names)
            torch.futures.collect_all([first]).add_done_callback(take_lock)
            second.add_done_callback(take_lock)
            for name in names:
                rpc.rpc_async("w1", set_event, (name,))
            assert second.wait() == names[1]
    for _ in range(40):
        assert done.acquire(timeout=_WAIT_S)


def _callbacks_come_while_answers_do():
    """A callback that is added just as a thread reads the answer still does not run in that thread."""
    ran_in = []
    stop = threading.Event()

    def read():
        while not stop.is_set():
            rpc.rpc_sync("w1", nothing)

    reader = threading.Thread(target=read, name="the reader")
    reader.start()
    for _ in range(300):
        called = threading.Event()

        def hear(_, called=called):
            ran_in.append(threading.current_thread().name)
            called.set()

        rpc.rpc_async("w1", nothing).add_done_callback(hear)
        assert called.wait(_WAIT_S)
    stop.set()
    reader.join()
    assert set(ran_in) <= {"MainThread", "phalanx-rpc-work"}


def _what_waits_for_all_hears_of_the_first_error():
    """It waited for all the others: an error that Python sets is a result in C++."""
    never = rpc.rpc_async("w1", wait_event, ("later",))
    with pytest.raises(KeyError, match="k"):
        torch.futures.wait_all([never, rpc.rpc_async("w1", fail, (KeyError("k"),))])
    assert not never.done()
    rpc.rpc_sync("w1", set_event, ("later",))
    both = torch.futures.collect_all([never, rpc.rpc_async("w1", same, (1,)), torch.futures.Future()][:2]).wait()
    assert [one.wait() for one in both] == ["later", 1]
    own = torch.futures.Future()
    own.set_result(2)
    assert torch.futures.wait_all([own]) == [2]


def _callbacks_of_calls_that_time_out_stop_no_clock():
    """They ran in the clock's thread: one that blocked, and no call timed out any more."""
    gate, entered = threading.Event(), threading.Event()

    def block(_):
        entered.set()
        assert gate.wait(_WAIT_S)

    futures = [rpc.rpc_async("w1", wait_event, ("too late",), timeout=0.05) for _ in range(3)]
    futures[0].add_done_callback(block)
    assert entered.wait(_WAIT_S)
    with pytest.raises(DeadlineError):
        rpc.rpc_sync("w1", wait_event, ("too late",), timeout=0.05)
    for one in futures:
        with pytest.raises(DeadlineError):
            one.wait()
    gate.set()
    rpc.rpc_sync("w1", set_event, ("too late",))


def _answers_that_nobody_waits_for_are_read():
    futures = [rpc.rpc_async("w1", same, (number,)) for number in range(10)]
    assert torch.futures.wait_all(futures) == list(range(10))
    done = threading.Event()
    rpc.rpc_async("w1", nothing).then(lambda _: done.set())
    assert done.wait(_WAIT_S)
    future = rpc.rpc_async("w1", same, (1,))
    while not future.done():
        pass
    assert future.wait() == 1


def _many_threads_wait():
    def call(first):
        for number in range(first, first + 50):
            assert rpc.rpc_sync("w1", same, (number,)) == number
            futures = [rpc.rpc_async("w1", same, (number + one,)) for one in range(3)]
            assert [one.wait() for one in futures] == [number, number + 1, number + 2]

    map_in_threads(call, range(0, 6000, 1000))


def _time_runs_out_for_who_reads():
    """The answer that comes too late is dropped, with the reference in it, and its line is used again."""
    lines = current.agent().peer(current.agent().membership.find("w1")).connection.lines
    with pytest.raises(DeadlineError, match=r"rpc_sync\(wait_event_and_refer\)"):
        rpc.rpc_sync("w1", wait_event_and_refer, ("never",), timeout=0.05)
    until(lambda: len(lines._transferred) == 1)
    assert rpc.rpc_sync("w1", same, (1,)) == 1
    rpc.rpc_sync("w1", set_event, ("never",))
    until(lambda: not lines._transferred)
    until(lambda: not rpc.rpc_sync("w1", num_references))
    assert not current.agent().num_in_flight


def wait_event_and_refer(name):
    wait_event(name)
    return rpc.RRef(1)


def num_references():
    return current.agent().references.count()["num_owner_rrefs"]


def _callbacks_of_one_answer_run_in_order():
    heard = []
    for number in range(50):
        future = rpc.rpc_async("w1", wait_event, (f"order {number}",))
        for one in range(5):
            future.add_done_callback(lambda _, one=one: heard.append(one))
        last = future.then(lambda done: heard.append(5))
        rpc.rpc_async("w1", set_event, (f"order {number}",))
        last.wait()
    assert heard == [0, 1, 2, 3, 4, 5] * 50


class _Calls:
    """Garbage of a circle, whose end waits for a call in whatever thread runs it."""

    def __init__(self, done):
        self.me, self.done = self, done

    def __del__(self):
        self.done.append(rpc.rpc_sync("w1", same, (8,)))


def _a_finalizer_in_the_reader_may_call():
    """It waited for what only its own thread could read."""
    done = []
    current.agent().reader.put(lambda: _Calls(done).me.__del__())
    until(lambda: done)
    assert done[0] == 8


def _all():
    _who_reads_and_runs()
    _callbacks_keep_nobody_waiting()
    _who_is_stuck_keeps_nobody_waiting()
    _answers_that_nobody_waits_for_are_read()
    _many_threads_wait()
    _time_runs_out_for_who_reads()
    _callbacks_do_not_run_in_a_thread_that_holds_what_they_want()
    _callbacks_of_one_answer_run_in_order()
    _callbacks_come_while_answers_do()
    _what_waits_for_all_hears_of_the_first_error()
    _callbacks_of_calls_that_time_out_stop_no_clock()
    _a_finalizer_in_the_reader_may_call()


def _breaks(rank, folder, over_line):
    join(rank, 2, folder)
    if rank:
        with pytest.raises(PeerLostError):
            rpc.shutdown()
        return
    agent = current.agent()
    peer = agent.peer(agent.membership.find("w1"))
    if over_line:
        until(lambda: rpc.rpc_sync("w1", same, (1,)) and peer.connection.lines._idle)
        frames = peer.connection.lines._idle[0]._frames
    else:
        frames = agent.connections.connect(peer)._frames
    sock = frames._socket

    def read(take_buffers):
        sock.recv(1)
        raise ValueError("no such kind of frame")

    frames.read = read
    call = rpc.rpc_sync if over_line else lambda *args, **kwargs: rpc.rpc_async(*args, **kwargs).wait()
    with pytest.raises(PeerLostError, match=r"\(same\) to .*: the worker is lost: its connection closed"):
        call("w1", same, (2,), timeout=20)
    rpc.shutdown(graceful=False)


def _ends(rank, folder):
    join(rank, 2, folder)
    if rank:
        signal.pause()  # until it is killed
    agent = current.agent()
    member = agent.membership.find("w1")
    peer = agent.peer(member)
    its_pid = rpc.rpc_sync("w1", pid)
    until(lambda: rpc.rpc_sync("w1", same, (1,)) and peer.connection.lines._idle)
    big = torch.arange(1 << 16)  # it lies in memory whose descriptor has not come yet
    answer = agent.invoke(member, "rpc_sync", "same", (same, (big,), {}), is_awaited=True)
    until(lambda: _peek(answer._line._socket))
    entered = threading.Event()
    stuck = rpc.rpc_async("w1", wait_event_and_stick, ("first",))
    rpc.rpc_async("w1", set_event, ("first",)).then(lambda _: entered.set())
    assert _entered.wait(_WAIT_S)  # it has come, and its maker is stuck
    os.kill(its_pid, signal.SIGKILL)
    until(lambda: peer.lost)
    assert torch.equal(answer.wait(), big)
    _gate.set()
    assert stuck.wait() == "first"
    with pytest.raises(PeerLostError):
        rpc.rpc_sync("w1", nothing)
    rpc.shutdown(graceful=False)


def _peek(sock):
    try:
        return sock.recv(1 << 16, socket.MSG_PEEK)
    except BlockingIOError:
        return b""


def test_received_answers_are_returned_after_the_end_of_their_worker():
    """Calls that had arrived but not run were dropped when the server ended, and their caller saw a lost worker."""
    run_workers(_ends, 2, lost=[1])


@pytest.mark.parametrize("over_line", [True, False])
def test_frames_that_make_no_sense_lose_the_worker_whoever_reads_them(over_line):
    """The thread that waited for an answer raised what parsing did, and what came next was read from its middle."""
    run_workers(_breaks, 2, over_line)


@pytest.mark.slow
def test_the_waiting_thread_reads_and_a_stuck_one_delays_no_other():
    run_caller(_all, 2)


def test_a_function_is_found_by_name_as_long_as_it_is_there(monkeypatch):
    """A name is pickled once; who replaces a function on either side is not called by the old one's name."""
    module = types.ModuleType("module_of_functions")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("def f(): return 1", module.__dict__)
    first = module.f
    name = serialization.names.of(first)
    assert name is not None
    assert serialization.names.find(name) is first
    exec("def f(): return 2", module.__dict__)
    assert serialization.names.of(first) is None
    assert serialization.names.find(name) is module.f
    with pytest.raises(pickle.PicklingError):
        serialization.serialize_call((first, (), {}), None)


def test_a_callable_that_is_no_function_of_a_module_is_pickled_with_its_arguments():
    """A bound method's object may be among the arguments: it must be the same one there."""
    items = [1]
    payload = serialization.serialize_call((items.append, (items,), {}), None)
    (method, args, _), _ = serialization.deserialize_call(payload.data, (), (), without_grad=False)
    method(2)
    assert args[0][-1] == 2
