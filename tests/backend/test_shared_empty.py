"""Tensors in the memory that all ranks share: reduced in place, mixed with others, let go and used anew."""

import gc

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.backend.inputs import assert_same, tensor_of
from tests.on_ranks import on_ranks

import phalanx
from phalanx.errors import PhalanxError
from phalanx.testing import RankFailed, run_ranks


def total_of(world_size, size, dtype=torch.float32):
    tensors = [tensor_of(r, size, dtype) for r in range(world_size)]
    return sum(tensors[1:], tensors[0].clone())


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_shared_tensors_are_reduced_in_place_at_every_size(rank, world_size):
    for size in (1, 1023, 1024, 1025, 16_385, 100_003):
        tensor = phalanx.shared_empty(size)
        tensor.copy_(tensor_of(rank, size))
        dist.all_reduce(tensor)
        assert_same(tensor, total_of(world_size, size), size)
    for dtype in (torch.bfloat16, torch.int8, torch.complex128):
        tensor = phalanx.shared_empty(3, 7001, dtype=dtype)
        assert tensor.shape == (3, 7001)
        tensor.copy_(tensor_of(rank, (3, 7001), dtype))
        dist.all_reduce(tensor)
        if dtype == torch.bfloat16:
            tensors = [tensor_of(r, (3, 7001), dtype).float() for r in range(world_size)]
            expected = sum(tensors[1:], tensors[0]).bfloat16()
        else:
            expected = total_of(world_size, (3, 7001), dtype)
        assert_same(tensor, expected, dtype)


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_ranks_may_mix_shared_and_private_tensors_and_different_places(rank, world_size):
    size = 50_001
    shared = phalanx.shared_empty(2 * size + 64)
    expected = total_of(world_size, size)
    places = {
        "some in the heap": shared[:size] if rank == 0 else torch.empty(size),
        "one at another offset": shared[64 : 64 + size] if rank == 1 else shared[:size],
        "all in the middle": shared[17 : 17 + size],
    }
    for name, tensor in places.items():
        shared.fill_(-1.0)
        tensor.copy_(tensor_of(rank, size))
        dist.all_reduce(tensor)
        assert_same(tensor, expected, name)
    assert bool((shared[:17] == -1).all())  # what lies around is left alone
    assert bool((shared[17 + size :] == -1).all())


@on_ranks(3)
def test_all_other_collectives_take_shared_tensors_too(rank, world_size):
    tensor = phalanx.shared_empty(10_000)
    tensor.fill_(rank)
    dist.broadcast(tensor, 2)
    assert bool((tensor == 2).all())
    parts = phalanx.shared_empty(world_size, 10_000)
    dist.all_gather_single(parts, tensor + rank)
    assert parts[:, 0].tolist() == [2.0, 3.0, 4.0]
    dist.all_reduce(parts[rank : rank + 1])  # a different row on each rank
    assert parts[rank, -1] == 9


@on_ranks(2)
def test_memory_is_used_anew_and_given_back_once_every_rank_has_let_go():
    def resident_kib():
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("RssShmem"))

    kept = phalanx.shared_empty(1000)
    kept.fill_(7.0)
    first = phalanx.shared_empty(1 << 20)
    at = first.data_ptr() - kept.data_ptr()
    first.fill_(1.0)
    view = first[5:10]  # holds the memory
    del first
    gc.collect()
    dist.barrier()
    second = phalanx.shared_empty(1 << 20)
    assert second.data_ptr() - kept.data_ptr() != at
    del view, second
    gc.collect()
    dist.barrier()
    third = phalanx.shared_empty(1 << 20)
    assert third.data_ptr() - kept.data_ptr() == at
    assert bool((third == 0).all())  # its pages were given back and are new
    assert bool((kept == 7).all())
    before = resident_kib()
    for _ in range(5):  # 4 MiB each
        again = phalanx.shared_empty(1 << 20)
        again.fill_(1.0)
        del again
        dist.barrier()
    assert resident_kib() - before < 10 * 1024


@on_ranks(2)
def test_a_huge_tensor_costs_nothing_until_it_is_touched(rank):
    tensor = phalanx.shared_empty(1 << 28)  # 1 GiB per rank
    tensor[:5000] = rank + 1.0
    tensor[-5000:] = rank + 1.0
    dist.all_reduce(tensor[:5000])
    dist.all_reduce(tensor[-5000:])
    assert (tensor[0].item(), tensor[-1].item()) == (3.0, 3.0)


@on_ranks(2)
def test_a_heap_without_room_says_so_on_every_rank_and_works_on():
    with pytest.raises(PhalanxError, match=r"shared_empty of \d+ bytes: .* is full") as caught:
        phalanx.shared_empty(1 << 50)
    assert "Release tensors" in str(caught.value)
    tensor = phalanx.shared_empty(5000)
    tensor.fill_(1.0)
    dist.all_reduce(tensor)
    assert tensor[0] == 2


@on_ranks(2)
def test_shared_tensors_outlive_their_group(rank):
    tensor = phalanx.shared_empty(5000)
    tensor.fill_(rank)
    dist.destroy_process_group()
    tensor.add_(1.0)
    assert bool((tensor == rank + 1).all())
    del tensor
    gc.collect()
    with open("/proc/self/maps") as f:
        assert "memfd:phalanx" not in f.read()


@on_ranks(2)
def test_empty_and_foreign_ones_are_plain_tensors_and_negative_sizes_are_refused():
    assert phalanx.shared_empty(0).shape == (0,)
    assert phalanx.shared_empty((2, 3)).shape == (2, 3)
    assert phalanx.shared_empty(()).shape == ()
    with pytest.raises(ValueError, match="shared_empty: negative size"):
        phalanx.shared_empty(-1)
    gloo = dist.new_group(backend="gloo")
    assert phalanx.shared_empty(4, group=gloo).shape == (4,)
    dist.barrier(gloo)  # a rank that ends while another still connects to it fails that one's new_group


def test_with_an_owner_it_is_one_memory_for_all_ranks_that_outlives_the_owner():
    def write_and_read(rank, world_size):
        tensor = phalanx.shared_empty(3, 1001, owner=world_size - 1)
        tensor.view(-1)[rank::world_size] = rank
        dist.barrier()
        seen = torch.equal(tensor.view(-1), (torch.arange(3003) % world_size).float())
        dist.barrier()
        if rank == world_size - 1:
            return seen  # it leaves, the others still hold the memory
        dist.destroy_process_group()
        return seen and tensor.sum().item() == float((torch.arange(3003) % world_size).sum())

    for world_size in (1, 2, 3):
        assert run_ranks(write_and_read, world_size) == [True] * world_size


def test_an_owner_who_is_no_rank_or_shares_no_memory_is_refused():
    def refused(rank, world_size):
        with pytest.raises(ValueError, match="owner=2 is not a rank of the group, which has 2"):
            phalanx.shared_empty(3, owner=2)

    def refused_on_gloo(rank, world_size):
        with pytest.raises(ValueError, match="owner=0 needs a group of backend 'phalanx' whose ranks are on one host"):
            phalanx.shared_empty(3, owner=0)

    run_ranks(refused, 2)
    run_ranks(refused_on_gloo, 1, backend="gloo")


def test_a_shape_may_be_of_any_integers():
    """One np.int64 was taken for a sequence: "'numpy.int64' object is not iterable"."""

    def ask(rank, world_size):
        three = np.int64(3)
        given = [
            (three,),
            ((three, 2),),
            (three, np.uint8(2)),
            (torch.tensor(3),),
            (torch.Size([3]),),
            ([],),
            (np.array([3, 2]),),
        ]
        return [tuple(phalanx.shared_empty(*size).shape) for size in given]

    expected = [(3,), (3, 2), (3, 2), (3,), (3,), (), (3, 2)]
    assert run_ranks(ask, 2) == [expected] * 2
    with pytest.raises(RankFailed, match="'float' object"):
        run_ranks(lambda rank, world_size: phalanx.shared_empty(3.0), 1)


def test_ranks_that_disagree_on_the_owner_are_told():
    def disagree(rank, world_size):
        phalanx.shared_empty(3, owner=rank)

    with pytest.raises(RankFailed, match="the ranks' calls do not match"):
        run_ranks(disagree, 2)


@on_ranks(1, init=False)
def test_without_a_group_it_says_what_to_call():
    """It was an AssertionError without a word."""
    with pytest.raises(RuntimeError, match=r"shared_empty needs a process group: call phalanx.init\(\) first"):
        phalanx.shared_empty(3)


@on_ranks(2)
def test_a_reduction_of_what_is_one_memory_for_all_ranks_is_refused(world_size):
    """Every rank wrote the sum into what the others still read: an all_reduce of a parameter that
    ZeroRedundancyOptimizer shares gave another number each time."""
    layer = torch.nn.Linear(300, 300)
    optimizer = phalanx.ZeroRedundancyOptimizer(layer.parameters(), torch.optim.SGD, lr=0.1)
    before = layer.weight.detach().clone()
    calls = (dist.all_reduce, lambda one: dist.reduce(one, 0), lambda one: dist.all_reduce(one, dist.ReduceOp.MAX))
    for tensor in (layer.weight.data, layer.weight.detach()[3:5], layer.bias.data):
        for call in calls:
            with pytest.raises(ValueError, match=r"on rank \d: the tensor of shape .* is the same memory on all ranks"):
                call(tensor)
    work = dist.all_reduce(layer.weight.data, async_op=True)
    with pytest.raises(ValueError, match="reduce a clone"):
        work.wait()
    assert torch.equal(layer.weight, before)
    mean = layer.weight.detach().clone()
    dist.all_reduce(mean)
    assert torch.equal(mean, before * world_size)
    known = dist.group.WORLD.transport.symm_mem.owned_blocks
    shared, before = phalanx.shared_empty(5, owner=0), len(known)
    del shared
    assert len(known) == before - 1
    assert optimizer is not None
