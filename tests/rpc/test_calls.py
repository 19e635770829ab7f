"""Calls between workers of one host: arguments and results, errors, threads, time-outs."""

import pickle
import threading
from collections import OrderedDict

import numpy
import pytest
import torch
from tests.rpc.workers import (
    Counter,
    OwnError,
    event,
    fail,
    nothing,
    pid,
    run_workers,
    same,
    set_event,
    wait_event,
    worker,
)
from tests.threads import map_in_threads

from phalanx import rpc
from phalanx.errors import DeadlineError

_WORDS = {"a": [1, 2.5, None], "b": ("c", b"d"), "e": OrderedDict(f=1)}


def _tensors():
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return [
        *(torch.tensor(3.5), torch.empty(0), torch.empty(3, 0, 2), base, base.t(), base[1:3, ::2], base > 3),
        *(base.to(torch.bfloat16), base.to(torch.complex64) * 1j, (base * 1j).conj(), base.to(torch.int8)),
        *(base.expand(2, 4, 6), base.to_sparse(), torch.arange(70_000, dtype=torch.float64)),
        *(torch.ones(300, 301).t(), torch.ones(1 << 20), torch.ones(2, requires_grad=True)),
        *(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.nn.Parameter(torch.ones(3))),
    ]


def _compare(sent, back):
    assert type(sent) is type(back)
    assert (sent.shape, sent.dtype, sent.requires_grad) == (back.shape, back.dtype, back.requires_grad)
    assert torch.equal(sent.to_dense() if sent.is_sparse else sent, back.to_dense() if back.is_sparse else back)


def _everything(rank, folder):
    with worker(rank, 2, folder):
        if rank == 0:
            for to in ("w1", 1, rpc.get_worker_info("w1"), "w0"):
                _check_values(to)
            _check_aliases()
            _check_errors()
            _check_concurrency()
            _check_timeouts()
            _check_wrong_calls()
            return rpc.rpc_sync("w1", pid)
        return pid()


def _check_values(to):
    for value in (1, "two", _WORDS, [], 1 << 80, b"x" * 300_000, "y" * 1_000_000, same, Counter, torch.float32):
        assert rpc.rpc_sync(to, same, (value,)) == value
    assert rpc.rpc_sync(to, same, args=(1,), kwargs={"k": 2}) == ((1,), {"k": 2})
    assert rpc.rpc_sync(to, nothing) is None
    assert rpc.rpc_async(to, torch.add, (torch.ones(2), 3)).wait().tolist() == [4, 4]
    assert rpc.rpc_sync(to, Counter(3).add, (4,), {"twice": True}) == 11
    for tensor in _tensors():
        _compare(tensor, rpc.rpc_sync(to, same, (tensor,)))
    many = rpc.rpc_sync(to, same, ({"x": _tensors(), "y": torch.ones(5)},))
    for sent, back in zip(_tensors(), many["x"], strict=True):
        _compare(sent, back)
    array = numpy.arange(30_000.0).reshape(3, -1)
    back = rpc.rpc_sync(to, same, (array,))
    assert numpy.array_equal(array, back)
    back += 1  # what arrives can be written
    assert all(one.set_(torch.ones(1)) is one for one in [rpc.rpc_sync(to, same, (torch.ones(4),))])


def _check_aliases():
    tensor = torch.ones(3)
    first, second = rpc.rpc_sync("w1", same, ((tensor, tensor),))
    assert first is second
    big = torch.ones(1 << 18)
    back = rpc.rpc_sync("w1", same, (big,))
    kept = [rpc.rpc_sync("w1", same, (big * n,)) for n in range(5)]
    big.zero_()
    back.add_(1)
    assert back.eq(2).all(), "what came back is ours alone"
    assert [one.unique().tolist() for one in kept] == [[n] for n in range(5)], "memory that is in use was used again"


def _check_errors():
    for error in (ValueError("Expected error"), KeyError("k"), ZeroDivisionError()):
        with pytest.raises(type(error)) as info:
            rpc.rpc_sync("w1", fail, (error,))
        assert info.value.args == error.args
        assert "in fail" in str(info.value.__cause__)
        assert "On WorkerInfo(id=1, name=w1):" in str(info.value.__cause__)
    with pytest.raises(OwnError) as own:
        rpc.rpc_async("w1", fail, (OwnError(7, "x"),)).wait()
    assert own.value.code == 7
    with pytest.raises(rpc.RemoteError, match=r"SystemExit: 3"):
        rpc.rpc_sync("w1", _exit)
    with pytest.raises(rpc.RemoteError, match=r"Local.*never heard of here"):
        rpc.rpc_sync("w1", _raise_local)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        rpc.rpc_sync("w1", lambda: 1)
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock'"):
        rpc.rpc_sync("w1", threading.Lock)
    assert rpc.rpc_sync("w1", same, (1,)) == 1


def _exit():
    raise SystemExit(3)


def _raise_local():
    class Local(Exception):
        def __reduce__(self):
            raise RuntimeError("not this one")

    raise Local("never heard of here")


def _nested(path):
    """Call the first worker of `path`, which calls the next one."""
    return rpc.rpc_sync(path[0], _nested, (path[1:],)) + 1 if path else 0


def _check_concurrency():
    # As many functions block as there are threads: answers are still heard, and a call that they wait for is not.
    waiting = [rpc.rpc_async("w1", wait_event, (f"e{n}",)) for n in range(4)]
    assert _nested(["w1", "w0", "w1", "w0", "w1"]) == 5
    for n in range(4):
        rpc.rpc_sync("w1", set_event, (f"e{n}",))
    assert [one.wait() for one in waiting] == ["e0", "e1", "e2", "e3"]
    # A callback that blocks the thread in which answers come in keeps no other answer waiting.
    blocked = rpc.rpc_async("w1", wait_event, ("go",)).then(lambda done: wait_event("callback"))
    rpc.rpc_sync("w1", set_event, ("go",))
    assert rpc.rpc_sync("w1", same, (2,)) == 2
    event("callback").set()
    assert blocked.wait() == "callback"
    assert map_in_threads(_many_calls, range(8)) == [sum(range(100))] * 8


def _many_calls(n):
    futures = [rpc.rpc_async("w1", same, (i,)) for i in range(100)]
    return sum(future.wait() for future in futures)


def _check_timeouts():
    with pytest.raises(
        DeadlineError, match=r"wait_event\) to worker 'w1'.*RPC ran for more than set timeout \(50 ms\)"
    ):
        rpc.rpc_sync("w1", wait_event, ("late",), timeout=0.05)
    future = rpc.rpc_async("w1", wait_event, ("late",), timeout=0)
    rpc.rpc_sync("w1", set_event, ("late",))
    assert future.wait() == "late"


def _check_wrong_calls():
    with pytest.raises(ValueError, match=r"Unknown destination worker w9: there are 'w0' \(rank 0\), 'w1' \(rank 1\)"):
        rpc.rpc_sync("w9", nothing)
    with pytest.raises(TypeError, match="should be callable"):
        rpc.rpc_sync("w1", 3)
    with pytest.raises(ValueError, match="Cannot get WorkerInfo"):
        rpc.rpc_async(None, nothing)
    with pytest.raises(RuntimeError, match="already initialized"):
        rpc.init_rpc("w7", rank=0, world_size=1)
    assert rpc.get_worker_info() == rpc.WorkerInfo("w0", 0)


@pytest.mark.slow
def test_a_call_carries_any_value_error_and_tensor_between_two_workers():
    found = run_workers(_everything, 2)
    assert found[0] == found[1], "the function ran in the other process"


def test_without_a_worker_a_call_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"RPC has not been initialized.*init_rpc"):
        rpc.rpc_sync("w1", nothing)
