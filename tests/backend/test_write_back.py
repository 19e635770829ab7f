"""Results reach the tensors that the caller holds, whatever these are: all their memory, as Gloo writes it.

`allreduce([sparse, sparse])` returned and had done nothing: results were written to a `detach()` of each tensor, and a
sparse one shares no memory with its own. Gloo takes no strided views: it gets copies, whose results are copied back.
"""

import zlib

import pytest
import torch
import torch.distributed as dist
from tests.backend.inputs import bits
from tests.backend.operations import OPERATIONS
from tests.parity.beside_gloo import assert_same_as_gloo, compare
from tests.system.hosts_jobs import on_hosts

from phalanx._comm.backend import create
from phalanx.testing import run_ranks, why_no_hosts

pytestmark = pytest.mark.filterwarnings("ignore:.*will be deprecated:FutureWarning")


def _leaf(values):
    memory = values.clone().requires_grad_()
    return memory, memory


def _view_of_leaf(values):
    memory = torch.stack([values, values + 1]).requires_grad_()
    return memory, memory.detach()[1]


def _one_of_several_views(values):
    """Autograd forbids writing to one of the views that one call has returned, but for those that ask for no graph."""
    memory = torch.stack([values, values + 1]).requires_grad_()
    return memory, (memory * 1).unbind()[0]


def _in_inference_mode(values):
    with torch.inference_mode():
        memory = values.clone()
        return memory, memory


def _view_in_inference_mode(values):
    with torch.inference_mode():
        memory = torch.stack([values, values + 1], 1)
        return memory, memory[:, 1]


def _strided(values, columns):
    memory = torch.full((len(values), columns), -1, dtype=values.dtype)
    memory[:, columns - 1] = values
    return memory, memory[:, columns - 1]


def _transposed(values):
    memory = values.clone().view(2, -1)
    return memory, memory.t()


def _negated(values):
    memory = -values
    return memory, torch._neg_view(memory)


LAYOUTS = {
    "plain": lambda values: (values, values),
    "leaf": _leaf,
    "view of a leaf": _view_of_leaf,
    "one of several views": _one_of_several_views,
    "inference": _in_inference_mode,
    "view in inference mode": _view_in_inference_mode,
    "every second": lambda values: _strided(values, 2),
    "last of three columns": lambda values: _strided(values, 3),
    "transposed": _transposed,
    "negated": _negated,
}


def _bits(tensor):
    return zlib.crc32(bits(tensor.detach().resolve_neg()))


def _every_layout(rank, world_size, n):
    found = {}
    group = dist.group.WORLD
    is_gloo = dist.get_backend() == "gloo"
    for name, (sizes_of, call) in OPERATIONS.items():
        ins, outs = sizes_of(n, world_size)
        for what, laid_out in LAYOUTS.items():
            if what == "transposed" and "splits" in name:
                continue  # it counts rows of one element
            pairs = [
                laid_out((torch.arange(size) * 7 % 23 + 100 * rank + 10 * at).double())
                for at, size in enumerate([*ins, *outs])
            ]
            tensors = [tensor for _, tensor in pairs]
            given = [t.detach().resolve_neg().clone(memory_format=torch.contiguous_format) for t in tensors]
            if not is_gloo:
                given = tensors
            call(group, given[: len(ins)], given[len(ins) :])
            if is_gloo:
                for tensor, result in list(zip(tensors, given, strict=True))[len(ins) :]:
                    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
                        tensor.copy_(result)
            found[f"{name}: {what}"] = [(_bits(memory), _bits(tensor)) for memory, tensor in pairs]
    return found


@pytest.mark.slow(but=("2-4",))
@pytest.mark.parametrize(("world_size", "n"), [(2, 4), (3, 6), (2, 20_000)])
def test_every_operation_writes_every_layout(world_size, n):
    ours = assert_same_as_gloo(_every_layout, world_size, n)
    assert len(ours[0]) > 150


@pytest.mark.slow
def test_every_operation_writes_every_layout_without_the_core(monkeypatch):
    monkeypatch.setattr(create, "_core", None)
    assert_same_as_gloo(_every_layout, 2, 4)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_every_operation_writes_every_layout_between_hosts():
    ours = on_hosts((2, 1), _between_hosts, run_s=120)
    compare(ours, run_ranks(_every_layout, 3, 6, backend="gloo"), 0.0)


def _between_hosts(rank, world_size, machines):
    return _every_layout(rank, world_size, 6)


def _coalesced(tensor):
    return tensor.coalesce()


SPARSE = {
    "plain": lambda tensor: tensor,
    "coalesced": _coalesced,
    "transposed": lambda tensor: tensor.transpose(0, 1),
    "detached": lambda tensor: tensor.detach(),
}


def _sparse(rank, at, entries, rows):
    generator = torch.Generator().manual_seed(100 * rank + at)
    indices = torch.randint(6, (2, entries), generator=generator)
    values = torch.randint(-8, 8, (entries, *rows), generator=generator).double()
    return torch.sparse_coo_tensor(indices, values, (6, 6, *rows), check_invariants=False)


def _every_sparse(rank, world_size):
    found = {}
    for what, made in SPARSE.items():
        for count in (1, 2, 3):
            for entries in (0, 1, 5, 2000):
                for rows in ((), (3,)):
                    tensors = [made(_sparse(rank, at, entries, rows)) for at in range(count)]
                    dist.group.WORLD.allreduce(tensors).wait()
                    if entries == 1 and count > 1:
                        dist.group.WORLD.allreduce([tensors[0]] * 2).wait()
                    found[what, count, entries, rows] = [
                        (t.is_coalesced(), t.detach().coalesce().indices(), t.detach().coalesce().values())
                        for t in tensors
                    ]
    return found


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_sparse_tensor_of_a_call_holds_the_sum(world_size):
    assert_same_as_gloo(_every_sparse, world_size)
