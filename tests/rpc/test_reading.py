"""Who reads answers: the thread that waits for one, or the leader; and nobody who is stuck keeps the others waiting."""

from __future__ import annotations

import pickle
import sys
import threading
import types

import pytest
import torch
from tests.rpc.workers import nothing, run_workers, same, set_event, wait_event, worker

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


def _reads_for_itself():
    assert "MainThread" in {rpc.rpc_sync("w1", whereabouts) for _ in range(200)}
    futures = [rpc.rpc_async("w1", whereabouts) for _ in range(200)]
    assert all(one.wait() in ("MainThread", "phalanx-rpc-serve") for one in futures)


def _callbacks_keep_nobody_waiting():
    """A callback that blocks is the leader's; the thread that reads goes on."""
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


def _who_is_stuck_loses_its_turn():
    """A callback that only C++ knows of runs in the thread that reads: while it blocks, others are answered."""
    gate, entered = threading.Event(), threading.Event()

    def block(_):
        entered.set()
        assert gate.wait(_WAIT_S)

    first = rpc.rpc_async("w1", wait_event, ("first",))
    torch.futures.collect_all([first]).add_done_callback(block)
    second = rpc.rpc_async("w1", wait_event, ("second",))
    reader = threading.Thread(target=second.wait)
    reader.start()
    rpc.rpc_async("w1", set_event, ("first",))
    assert entered.wait(_WAIT_S)
    for number in range(20):
        assert rpc.rpc_sync("w1", same, (number,)) == number
    rpc.rpc_sync("w1", set_event, ("second",))
    assert second.wait() == "second"
    gate.set()
    reader.join()


def _answers_that_nobody_waits_for_are_read():
    for _ in range(20):  # so many waits that the next calls are expected to be waited for as well
        futures = [rpc.rpc_async("w1", same, (number,)) for number in range(10)]
        assert [one.wait() for one in futures] == list(range(10))
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
        ended.append(first)

    ended: list[int] = []
    threads = [threading.Thread(target=call, args=(1000 * one,)) for one in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(ended) == [1000 * one for one in range(6)]


def _time_runs_out_for_who_reads():
    with pytest.raises(DeadlineError, match=r"rpc_sync\(wait_event\)"):
        rpc.rpc_sync("w1", wait_event, ("never",), timeout=0.05)
    assert rpc.rpc_sync("w1", same, (1,)) == 1
    rpc.rpc_sync("w1", set_event, ("never",))


def _all(rank, folder):
    with worker(rank, 2, folder):
        if rank == 0:
            _reads_for_itself()
            _callbacks_keep_nobody_waiting()
            _who_is_stuck_loses_its_turn()
            _answers_that_nobody_waits_for_are_read()
            _many_threads_wait()
            _time_runs_out_for_who_reads()


def _breaks(rank, folder):
    rpc.init_rpc(
        f"w{rank}", rank=rank, world_size=2, rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{folder}/s")
    )
    if rank:
        with pytest.raises(PeerLostError):
            rpc.shutdown()
        return
    agent = current.agent()
    assert rpc.rpc_sync("w1", same, (1,)) == 1
    connection = agent.peer(agent.membership.find("w1")).connection

    def read():
        connection.socket.recv(1)
        raise ValueError("no such kind of frame")

    connection._read = read
    with pytest.raises(PeerLostError, match=r"rpc_sync\(same\) to .*: the worker is lost: its connection closed"):
        rpc.rpc_sync("w1", same, (2,), timeout=20)
    rpc.shutdown(graceful=False)


def test_frames_that_make_no_sense_lose_the_worker_whoever_reads_them():
    """The thread that waited for an answer raised what parsing did, and what came next was read from its middle."""
    run_workers(_breaks, 2)


def test_the_thread_that_waits_reads_and_nobody_who_is_stuck_keeps_others_waiting():
    run_workers(_all, 2)


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


def test_what_is_no_function_of_a_module_is_pickled_with_its_arguments():
    """A bound method's object may be among the arguments: it must be the same one there."""
    items = [1]
    payload = serialization.serialize_call((items.append, (items,), {}), None)
    (method, args, _), _ = serialization.deserialize_call(payload.data, (), (), without_grad=False)
    method(2)
    assert args[0][-1] == 2
