"""Every reduction of every dtype, at every size where the core changes its way, compared bit for bit."""

import hashlib

import pytest
import torch
import torch.distributed as dist
from tests.backend.inputs import (
    ARITHMETIC,
    BITWISE,
    COMPLEX,
    FLOATS,
    HALVES,
    INTEGERS,
    MOVED_ONLY,
    SIZES,
    assert_same,
    bits,
    reduced,
    tensor_of,
)
from tests.on_ranks import on_ranks
from torch._C._distributed_c10d import _make_nccl_premul_sum as premul_sum
from torch.distributed import ReduceOp

from phalanx.testing import run_ranks

WORLD_SIZES = (1, 2, 3)


def contributions(world_size, size, dtype):
    return [tensor_of(rank, size, dtype) for rank in range(world_size)]


# A complex product is not compared bit for bit; see its own test.
REDUCTIONS = {
    **{dtype: ARITHMETIC + BITWISE for dtype in INTEGERS},
    **{dtype: ARITHMETIC for dtype in (*HALVES, *FLOATS)},
    **{dtype: (ReduceOp.SUM, ReduceOp.AVG) for dtype in COMPLEX},
    torch.bool: (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, *BITWISE),
}


def without_overflow(tensors):
    """A mean of 64-bit integers is only asked for where their sum has 64 bits."""
    if tensors[0].dtype not in (torch.int64, torch.uint64):
        return tensors
    return [(t.view(torch.int64) % (1 << 60)).view(t.dtype) for t in tensors]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_every_reduction_of_every_dtype_is_what_torch_computes(rank, world_size):
    for dtype, ops in REDUCTIONS.items():
        anything = contributions(world_size, 1003, dtype)
        for op in ops:
            tensors = without_overflow(anything) if op == ReduceOp.AVG else anything
            tensor = tensors[rank].clone()
            dist.all_reduce(tensor, op)
            assert_same(tensor, reduced(tensors, op), (dtype, op))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce_is_right_and_the_same_on_all_ranks_at_every_size(world_size):
    def check(rank, world_size):
        digest = hashlib.sha256()
        for size in SIZES:
            tensors = contributions(world_size, size, torch.float32)
            tensor = tensors[rank].clone()
            dist.all_reduce(tensor)
            assert_same(tensor, reduced(tensors, ReduceOp.SUM), size)
            digest.update(bits(tensor))
        return digest.hexdigest()

    first, second = run_ranks(check, world_size), run_ranks(check, world_size)
    assert len({*first, *second}) == 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_reduce_changes_the_destination_only(rank, world_size):
    for size in (0, 1, 1000, 40_000):
        for dst in range(world_size):
            tensors = contributions(world_size, size, torch.float32)
            tensor = tensors[rank].clone()
            dist.reduce(tensor, dst, ReduceOp.MAX)
            expected = reduced(tensors, ReduceOp.MAX) if rank == dst else tensors[rank]
            assert_same(tensor, expected, (size, dst))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@on_ranks()
def test_reduce_scatter_leaves_each_rank_its_part(rank, world_size):
    for size in (0, 1, 3, 1000, 16_385, 70_001):
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            tensors = contributions(world_size, (world_size, size), torch.float32)
            expected = reduced([t[rank] for t in tensors], op)

            output = torch.full((size,), -1.0)
            dist.reduce_scatter(output, list(tensors[rank].clone()), op)
            assert_same(output, expected, ("list", size, op))

            output = torch.full((size,), -1.0)
            dist.reduce_scatter_single(output, tensors[rank].reshape(-1).clone(), op)
            assert_same(output, expected, ("tensor", size, op))

            whole = tensors[rank].clone()
            dist.reduce_scatter_single(whole[rank], whole, op)  # into a part of the input itself
            assert_same(whole[rank], expected, ("in place", size, op))


@on_ranks(3)
def test_reduce_scatter_takes_inputs_of_different_sizes(rank, world_size):
    sizes = (5, 0, 70_000)
    inputs = [[tensor_of(r * 10 + to, sizes[to]) for to in range(world_size)] for r in range(world_size)]
    output = torch.empty(sizes[rank])
    dist.reduce_scatter(output, inputs[rank])
    assert_same(output, reduced([i[rank] for i in inputs], ReduceOp.SUM), rank)


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_premul_sum_multiplies_each_input_once_in_its_own_dtype(rank, world_size):
    for dtype in (*HALVES, *FLOATS, *COMPLEX):
        for factor in (0.3, torch.tensor([0.3], dtype=torch.float64)):
            tensors = contributions(world_size, 1003, dtype)
            scaled = [(t * factor).to(dtype) for t in tensors]
            expected = reduced(scaled, ReduceOp.SUM)

            tensor = tensors[rank].clone()
            dist.all_reduce(tensor, premul_sum(factor))
            assert_same(tensor, expected, ("all_reduce", dtype))

            strided = torch.zeros(1003, 2, dtype=dtype)[:, 0]
            strided.copy_(tensors[rank])
            dist.all_reduce(strided, premul_sum(factor))
            assert_same(strided, expected, ("strided", dtype))

            output = torch.zeros(1003, dtype=dtype)
            dist.reduce_scatter(output, [tensors[rank]] * world_size, premul_sum(factor))
            assert_same(output, expected, ("reduce_scatter", dtype))
            assert_same(tensors[rank], contributions(world_size, 1003, dtype)[rank], "the input is left alone")


@pytest.mark.parametrize("world_size", [3])
@on_ranks()
def test_a_nan_wins_minimum_and_maximum_as_in_torch(rank, world_size):
    for dtype in (*HALVES, *FLOATS):
        for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.SUM):
            tensor = torch.ones(50, dtype=dtype)
            tensor[rank] = float("nan")
            tensor[10 + rank] = float("inf")
            dist.all_reduce(tensor, op)
            assert tensor.isnan().tolist() == [i < world_size for i in range(50)], (dtype, op)


@pytest.mark.parametrize("world_size", [3])
@on_ranks()
def test_a_complex_product_is_the_product(rank, world_size):
    for dtype in COMPLEX:
        tensors = contributions(world_size, 1003, dtype)
        tensor = tensors[rank].clone()
        dist.group.WORLD.allreduce([tensor], ReduceOp.PRODUCT).wait()  # torch's front door has none
        assert torch.allclose(tensor, reduced(tensors, ReduceOp.PRODUCT))


@pytest.mark.parametrize("world_size", [3])
@on_ranks()
def test_half_types_round_once_at_the_edges_of_their_range(rank, world_size):
    """Every bf16 and f16 bit pattern, subnormals and infinities included, beside its mirror image."""
    patterns = torch.arange(1 << 16).to(torch.uint16)
    for dtype in HALVES:
        tensors = [patterns.roll(r * 12_345).view(dtype) for r in range(world_size)]
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
            expected = reduced(tensors, op)
            tensor = tensors[rank].clone()
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor.isnan(), expected.isnan()), (dtype, op)
            numbers = ~expected.isnan()
            assert_same(tensor[numbers], expected[numbers], (dtype, op))


@on_ranks(2)
def test_reductions_without_a_meaning_are_refused_by_name_before_any_rank_waits():
    def refused(tensor, op):
        with pytest.raises(ValueError, match="is not defined for") as caught:
            dist.group.WORLD.allreduce([tensor], op)
        return str(caught.value)

    for dtype in MOVED_ONLY:
        text = refused(tensor_of(0, 4, dtype), ReduceOp.SUM)
        assert text == f"all_reduce: SUM is not defined for {str(dtype).removeprefix('torch.')} tensors"
    for dtype in (torch.float16, torch.float32, torch.complex64):
        for op in BITWISE:
            refused(tensor_of(0, 4, dtype), op)
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        assert "complex64" in refused(tensor_of(0, 4, torch.complex64), op)
    assert "AVG is not defined for bool tensors" in refused(torch.ones(4, dtype=torch.bool), ReduceOp.AVG)
    for dtype in (torch.int32, torch.bool):
        text = refused(torch.ones(4, dtype=dtype), premul_sum(0.5))
        assert "PREMUL_SUM is not defined for" in text
    dist.barrier()  # nobody waits for anybody: the group still works
