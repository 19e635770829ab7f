"""Profiles of calls: what runs on other workers, by their names and numbers."""

import pytest
import torch
from tests.rpc.workers import fail, run_caller

from phalanx import rpc


def _multiply(x):
    return torch.mul(x, 2)


def _call_on(to, x):
    return rpc.rpc_sync(to, _multiply, (torch.relu(x),))


@rpc.functions.async_execution
def _call_later(to, x):
    return rpc.rpc_async(to, _multiply, (x,)).then(lambda done: done.value() + 1)


class _Table:
    def __init__(self):
        self.rows = torch.ones(3)

    def scale(self):
        return torch.mul(self.rows, 3)


def _profiles():
    x = torch.ones(2)
    with rpc.profile(profile_memory=True) as taken:
        assert torch.equal(rpc.rpc_sync("w1", _call_on, ("w2", x)), 2 * x)
        assert torch.equal(rpc.rpc_async("w1", _call_later, ("w2", x)).wait(), 2 * x + 1)
        table = rpc.remote("w1", _Table)
        assert table.rpc_sync().scale().tolist() == [3, 3, 3]
        table._get_profiling_future().wait()
        assert torch.equal(rpc.rpc_sync("w0", _multiply, (x,)), 2 * x)
        with pytest.raises(KeyError):
            rpc.rpc_sync("w1", fail, (KeyError("k"),))
    found = {event.name: event for event in taken.function_events}
    nodes = {name: event.node_id for name, event in found.items()}
    first, later = "rpc_sync#_call_on(w0 -> w1)", "rpc_async#_call_later(w0 -> w1)"
    inner, inner_later = "#remote_op: rpc_sync#_multiply(w1 -> w2)", "#remote_op: rpc_async#_multiply(w1 -> w2)"
    assert nodes[first] == 0
    assert nodes[f"{first}#remote_op: aten::relu"] == nodes[first + inner] == 1
    assert nodes[f"{first}{inner}#remote_op: aten::mul"] == 2
    assert nodes[later + inner_later] == 1
    assert nodes[f"{later}{inner_later}#remote_op: aten::mul"] == 2
    assert nodes["rpc_remote#_Table(w0 -> w1)#remote_op: aten::ones"] == 1
    assert nodes["rpc_sync#_multiply(w0 -> w0)#remote_op: aten::mul"] == 0
    assert nodes["rpc_sync#call_method(w0 -> w1)#remote_op: aten::mul"] == 1
    outer, mul = found[first].time_range, found[f"{first}{inner}#remote_op: aten::mul"].time_range
    assert outer.start <= mul.start <= mul.end <= outer.end
    assert found[f"{first}#remote_op: aten::relu"].cpu_memory_usage > 0
    assert "_multiply" in taken.key_averages().table()
    with torch.profiler.profile() as own:  # it shows the calls
        rpc.rpc_sync("w1", _call_on, ("w2", x))
        with pytest.raises(KeyError):
            rpc.rpc_async("w1", fail, (KeyError("k"),)).wait()
    assert first in {event.key for event in own.key_averages()}


def test_a_profile_has_what_calls_run_on_other_workers():
    """The callee's operators did not reach the caller's profile at all; and within any profile a call that failed
    returned None: the future that the profiler's C++ hands on takes an error of Python's for a result."""
    run_caller(_profiles, 3)
