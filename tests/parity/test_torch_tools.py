"""What PyTorch's own tools see of our operations: what they see of Gloo's.

Our groups are Python from end to end, so no operator `c10d::*` ran: CommDebugMode counted nothing, a TorchDispatchMode
saw nothing, and make_fx left the collective out of its graph without a word, which then computed something else. And
the profiler had no event of ours.
"""

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch.autograd.profiler import profile
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning", "ignore::DeprecationWarning")


class Watch(TorchDispatchMode):
    """Keeps the names of c10d's operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            assert getattr(torch.ops.c10d, func._overloadpacket.__name__).default is func
            self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _everything(rank, group):
    """Every operation once, and what came of them."""
    x = torch.arange(4.0) + rank
    parts = [torch.empty(4), torch.empty(4)]
    other, results = 1 - rank, []
    y = x.clone()
    dist.all_reduce(y, group=group)
    z = x.clone()
    dist.all_reduce(z, dist.ReduceOp.MAX, group=group, async_op=True).wait()
    w = x.clone()
    dist.all_reduce(w, dist._make_nccl_premul_sum(2.0) if group is dist.group.WORLD else dist.ReduceOp.SUM, group=group)
    dist.broadcast(x, 1, group=group)
    dist.all_gather(parts, y, group=group)
    whole, half, swapped = torch.empty(8), torch.empty(2), torch.empty(4)
    dist.all_gather_into_tensor(whole, y, group=group)
    dist.reduce_scatter_tensor(half, y, group=group)
    dist.reduce_scatter(torch.empty(4), parts, group=group)
    dist.all_to_all_single(swapped, whole[:4] + rank, group=group)
    r = z.clone()
    dist.reduce(r, 0, group=group)
    dist.gather(z, parts if rank == 0 else None, group=group)
    dist.scatter(y, parts if rank == 0 else None, group=group)
    received = torch.empty(4)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x + rank, other, group), dist.P2POp(dist.irecv, received, other, group)]
    )
    for work in works:
        work.wait()
    dist.barrier(group=group)
    results += [y, z, w, x, *parts, whole, half, swapped, received]
    return torch.cat(results)


@pytest.mark.slow
@on_ranks(2)
def test_the_dispatchers_modes_see_what_they_see_of_gloo(rank):
    gloo = dist.new_group(backend="gloo")
    plain = _everything(rank, None)
    with Watch() as ours:
        watched = _everything(rank, dist.group.WORLD)
    with Watch() as theirs:
        _everything(rank, gloo)
    with CommDebugMode() as counts:
        _everything(rank, None)
    with DebugMode() as printed:
        _everything(rank, None)
    assert "c10d::allreduce_" in printed.debug_string()
    with CommDebugMode() as their_counts:
        _everything(rank, gloo)
    assert dict(counts.get_comm_counts()) == dict(their_counts.get_comm_counts())
    assert counts.get_total_counts() > 5
    assert ours.names == theirs.names
    assert not torch.equal(plain, torch.zeros_like(plain))
    premul = slice(8, 12)  # PREMUL_SUM in the one, SUM in the other
    torch.testing.assert_close(watched[premul], plain[premul] * 2)
    plain[premul] = watched[premul]
    assert torch.equal(plain, watched)


def _function(x, group=None):
    y = x * 2
    dist.all_reduce(y, group=group)
    dist.broadcast(y, 1, group=group)
    return y + 1


@pytest.mark.slow
@on_ranks(2)
def test_make_fx_draws_the_collectives_and_the_graph_carries_them_out(rank):
    gloo = dist.new_group(backend="gloo")
    x = torch.arange(4.0) + rank
    seen = []
    for drawing in (
        {"tracing_mode": "real"},
        {"tracing_mode": "fake"},
        {"tracing_mode": "symbolic"},
        {"pre_dispatch": True},
    ):
        graph = make_fx(lambda x: _function(x), **drawing)(x)
        theirs = make_fx(lambda x: _function(x, gloo), **drawing)(x)
        assert graph.code == theirs.code, drawing
        assert torch.equal(graph(x), _function(x)), drawing
        seen.append("allreduce_" in graph.code and "broadcast_" in graph.code)
    with torch._subclasses.FakeTensorMode() as fake:
        assert _function(fake.from_tensor(x)).shape == (4,)  # nothing is sent
    assert seen == [True] * 4


@on_ranks(2)
def test_torch_func_transforms_a_function_with_a_collective(rank):
    """Its tensors have no memory of their own: the dispatcher takes them apart, which we had gone around."""

    def scaled(x):
        y = (x * 2).detach().clone()
        dist.all_reduce(y)
        return (y * x).sum()

    x = torch.arange(3.0) + rank
    assert torch.equal(torch.func.functionalize(_function)(x), _function(x))
    assert (torch.func.grad(scaled)(x).tolist()) == [2.0, 6.0, 10.0]


def _events(rank, world_size, use_kineto):
    x = torch.ones(3, 4)
    with profile(use_kineto=use_kineto, record_shapes=True) as profiled:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.all_gather([torch.empty(3, 4), torch.empty(3, 4)], x)
        dist.barrier()
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        with pytest.raises(ValueError, match="dst"):
            dist.reduce(x, 7)
    dist.all_reduce(x)  # unseen
    return [
        (e.name, e.is_async, e.count, e.input_shapes) for e in profiled.function_events if e.name.startswith("phalanx")
    ]


@pytest.mark.parametrize("use_kineto", [True, False])
def test_the_profiler_has_an_asynchronous_event_for_each_call(use_kineto):
    shape = [[3, 4]]
    for rank, events in enumerate(run_ranks(_events, 2, use_kineto)):
        assert sorted(events) == sorted(
            [
                ("phalanx:all_reduce", True, 1, shape),
                ("phalanx:all_reduce", True, 1, shape),
                ("phalanx:all_gather", True, 1, shape),
                ("phalanx:barrier", True, 1, []),
                ("phalanx:reduce", True, 1, shape),
                ("phalanx:send" if rank == 0 else "phalanx:recv", True, 1, shape),
            ]
        )
