"""Tensors of one call that share memory: each is read as it was before the call.

`all_reduce_coalesced([t, t])` reduced each alias again: 42 where Gloo leaves 21, and `[21, 42, 42, 21]` of views that
overlap. Here every operation of several tensors gets every pair of them at the same place, and at places that overlap.
All its memory must be what Gloo makes of copies, whose results are written back in order: Gloo itself reads some inputs
after it has written to them, and its reduce_scatter ends the process.
"""

import itertools
import zlib

import pytest
import torch
import torch.distributed as dist
from tests.backend.operations import OPERATIONS
from tests.on_ranks import on_ranks
from tests.parity.beside_gloo import assert_same_as_gloo

from phalanx._comm.backend import create

pytestmark = pytest.mark.filterwarnings("ignore:.*will be deprecated:FutureWarning")


def _places(ins, outs, is_in_place):
    """Where each tensor begins: apart; then each pair, of which one is written, at one place or overlapping."""
    sizes = [*ins, *outs]
    apart = list(itertools.accumulate(sizes, initial=0))
    yield "apart", apart[:-1]
    for a, b in itertools.combinations(range(len(sizes)), 2):
        if b < len(ins) or (a >= len(ins) and not is_in_place):
            continue  # both are read, or both are written: then the order of writing decides
        small, large = sorted((a, b), key=lambda at: (sizes[at], at))
        for shift in sorted({0, 1, sizes[large] // 2, sizes[large] - 1, -1, -(sizes[small] // 2)}):
            moved = apart[:-1]
            moved[large] = apart[-1] + sizes[small]
            moved[small] = moved[large] + shift
            yield f"{small} in {large} at {shift}", moved


def _all_places(rank, world_size, n, dtype):
    found = {}
    group = dist.group.WORLD
    for name, (sizes_of, call) in OPERATIONS.items():
        ins, outs = sizes_of(n, world_size)
        for what, places in _places(ins, outs, is_in_place=name.startswith(("all_reduce", "broadcast"))):
            length = sum(ins) + sum(outs) + 3 * n * world_size
            memory = (torch.arange(length) * 7 % 23 + 100 * rank).to(dtype)
            views = [memory[at : at + size] for at, size in zip(places, [*ins, *outs], strict=True)]
            tensors = views if dist.get_backend() != "gloo" else [view.clone() for view in views]
            call(group, tensors[: len(ins)], tensors[len(ins) :])
            for view, tensor in list(zip(views, tensors, strict=True))[len(ins) :]:
                if view is not tensor:
                    view.copy_(tensor)
            found[f"{name}: {what}"] = memory if n < 1000 else zlib.crc32(memory.numpy())
    return found


@pytest.mark.slow(but=("2-4",))
@pytest.mark.parametrize(("world_size", "n"), [(2, 4), (3, 3), (2, 20_000)])
def test_tensors_that_share_memory_are_read_as_they_were(world_size, n):
    ours = assert_same_as_gloo(_all_places, world_size, n, torch.int64)
    assert len(ours[0]) > 100


@pytest.mark.slow
def test_tensors_that_share_memory_are_read_as_they_were_without_the_core(monkeypatch):
    monkeypatch.setattr(create, "_core", None)
    assert_same_as_gloo(_all_places, 2, 4, torch.int64)


# name -> the operation in its message, the list there, and the call with a list of outputs.
LISTS = {
    "all_gather": ("all_gather", "tensor_list[{}]", lambda g, o, t: dist.all_gather(o, t)),
    "all_gather, asynchronous": (
        "all_gather",
        "tensor_list[{}]",
        lambda g, o, t: dist.all_gather(o, t, async_op=True).wait(),
    ),
    "all_gather_coalesced": (
        "all_gather_coalesced",
        "output_lists[{}][1]",
        lambda g, o, t: dist.all_gather_coalesced([[torch.zeros(4), output] for output in o], [t, t]),
    ),
    "gather": ("gather", "gather_list[{}]", lambda g, o, t: _gather_on_each(g, o, t)),
    "all_to_all": (
        "all_to_all",
        "output_tensor_list[{}]",
        lambda g, o, t: dist.all_to_all(o, [t + 100 * r for r in range(g.size())]),
    ),
}


def _gather_on_each(group, outputs, tensor):
    """Gather on every rank, into its outputs on this one."""
    for root in range(group.size()):
        mine = outputs if root == group.rank() else None
        dist.gather(tensor, mine, root)


@on_ranks(3)
def test_outputs_that_share_memory_are_refused_on_all_ranks_before_anything_is_sent(rank, world_size):
    """`all_gather([t] * 2, ...)` left each rank with other numbers, as its own part was written first."""
    memory = torch.zeros(world_size, 8)
    shared = {
        "one tensor": [memory[0, :4]] * world_size,
        "parts of one": [memory.view(-1)[2 * r : 2 * r + 4] for r in range(world_size)],
        "columns of one": [memory.view(-1).as_strided((2, 2), (8, 1), r) for r in range(world_size)],
    }
    for name, (operation, place, call) in LISTS.items():
        if name == "gather":
            continue  # the others would wait for a root that was refused
        for what, outputs in shared.items():
            with pytest.raises(ValueError, match="share memory, so they cannot hold two results") as caught:
                call(dist.group.WORLD, outputs, torch.full((4,), 1.0 + rank).view(outputs[0].shape))
            assert str(caught.value).startswith(f"{operation}: {place.format(0)} and {place.format(1)} "), what
            assert isinstance(caught.value, RuntimeError)
    with pytest.raises(ValueError, match=r"^gather: gather_list\[0\] and gather_list\[1\] share memory"):
        dist.gather(torch.ones(4), shared["one tensor"], rank)
    assert not memory.any()
    dist.barrier()


@on_ranks(3)
def test_outputs_may_be_the_columns_of_a_matrix(rank, world_size):
    for name, (_, _, call) in LISTS.items():
        for whole in (torch.zeros(4, world_size), torch.zeros(1, 4, world_size)[0]):
            call(dist.group.WORLD, list(whole.unbind(1)), torch.arange(4.0) + 10 * rank)
            sent_on = 100 * rank if name == "all_to_all" else 0
            for r, column in enumerate(whole.unbind(1)):
                assert column.tolist() == [sent_on + 10 * r + i for i in range(4)], name
