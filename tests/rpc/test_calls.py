"""Calls between workers of one host: arguments and results, errors, threads, time-outs."""

import pickle
import threading
from collections import OrderedDict

import numpy
import pytest
import torch
from tests.rpc.workers import (
    Counter,
    fail,
    nothing,
    pid,
    run_caller,
    same,
    set_event,
    wait_event,
)
from tests.threads import map_in_threads

from phalanx import rpc

_WORDS = {"a": [1, 2.5, None], "b": ("c", b"d"), "e": OrderedDict(f=1)}


def _everything():
    for to in ("w1", 1, rpc.get_worker_info("w1"), "w0"):
        _check_values(to)
    _check_aliases()
    _check_errors()
    _check_concurrency()
    _check_wrong_calls()
    assert rpc.rpc_sync("w1", pid) != pid(), "the function ran in the other process"


def _check_values(to):
    for value in (1, "two", _WORDS, [], 1 << 80, b"x" * 300_000, "y" * 1_000_000, same, Counter, torch.float32):
        assert rpc.rpc_sync(to, same, (value,)) == value
    assert rpc.rpc_sync(to, same, args=(1,), kwargs={"k": 2}) == ((1,), {"k": 2})
    assert rpc.rpc_sync(to, nothing) is None
    assert rpc.rpc_async(to, torch.add, (torch.ones(2), 3)).wait().tolist() == [4, 4]
    assert rpc.rpc_sync(to, Counter(3).add, (4,), {"twice": True}) == 11
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
    with pytest.raises(AttributeError, match="an attribute of mine") as caught:  # it has nothing to do with a name
        rpc.rpc_sync("w1", same, (Broken(),))
    assert "does not serialize function code" not in str(caught.value)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        rpc.rpc_sync("w1", lambda: 1)
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock'"):
        rpc.rpc_sync("w1", threading.Lock)
    assert rpc.rpc_sync("w1", same, (1,)) == 1


class Broken:
    def __reduce__(self):
        return _break, ()


def _break():
    raise AttributeError("an attribute of mine")


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
    assert map_in_threads(_many_calls, range(8)) == [sum(range(100))] * 8


def _many_calls(n):
    futures = [rpc.rpc_async("w1", same, (i,)) for i in range(100)]
    return sum(future.wait() for future in futures)


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
    run_caller(_everything, 2)


def test_without_a_worker_a_call_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"RPC has not been initialized.*init_rpc"):
        rpc.rpc_sync("w1", nothing)
