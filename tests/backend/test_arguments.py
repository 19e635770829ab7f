"""Calls that no world could make right are refused at the door, by name, before any rank waits for another."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch._C import _distributed_c10d as c10d

from phalanx._comm.backend.arguments import reduction_of, split_rows, timeout_of
from phalanx.testing import run_ranks


def ones(*size, dtype=torch.float32):
    return torch.ones(*size, dtype=dtype)


def gather_options(root):
    options = c10d.GatherOptions()
    options.rootRank = root
    return options


def broadcast_options(root):
    options = c10d.BroadcastOptions()
    options.rootRank = root
    return options


# What rank 0 of 2 calls on its group, and what it reads.
WRONG = {
    "a list of none": (lambda g: g.allreduce([]), "all_reduce: requires non-empty tensor list"),
    "several per call": (
        lambda g: g.reduce([ones(1), ones(1)]),
        "reduce: requires a single-element tensor list, got 2 tensors",
    ),
    "another device": (
        lambda g: dist.all_reduce(torch.empty(3, device="meta")),
        "all_reduce: the tensor is on meta; backend 'phalanx' supports CPU tensors, and CUDA tensors through NCCL.\n"
        "Move the tensor with .cpu(), or create a group whose backend supports meta tensors: new_group(backend=...).",
    ),
    "another device to send": (lambda g: dist.send(torch.empty(3, device="meta"), 1), "send: the tensor is on meta;"),
    "sparse where it has no meaning": (
        lambda g: g.broadcast([torch.eye(3).to_sparse()]),
        "broadcast: unsupported layout: the tensor is torch.sparse_coo; only all_reduce takes sparse tensors",
    ),
    "too few outputs": (
        lambda g: dist.all_gather([ones(3)], ones(3)),
        "all_gather: invalid output tensor list: tensor_list holds 1 tensors, the group has 2 ranks",
    ),
    "an output of another size": (
        lambda g: dist.all_gather([ones(4), ones(3)], ones(3)),
        "invalid tensor size at index 0: tensor_list[0] has 4 elements, this rank's tensor of shape (3,) has 3",
    ),
    "an output of another dtype": (
        lambda g: g.allgather([[ones(3), ones(3).double()]], [ones(3)]),
        "all_gather: invalid tensor type at index 1: tensor_list[1] is torch.float64, the tensor is torch.float32",
    ),
    "a whole that is no multiple": (
        lambda g: dist.all_gather_single(ones(5), ones(3)),
        "invalid tensor size: the output has 5 elements, but 2 ranks with 3 elements each (the input) need 6",
    ),
    "a whole of another dtype": (
        lambda g: g.all_gather_single(ones(6).double(), ones(3)),
        "all_gather_into_tensor: invalid tensor type: the output is torch.float64, the input is torch.float32",
    ),
    "an input that cannot be shared": (
        lambda g: dist.reduce_scatter_single(ones(3), ones(5)),
        "invalid tensor size: the input has 5 elements, but 2 ranks with 3 elements each (the output) need 6",
    ),
    "an input of another size": (
        lambda g: dist.reduce_scatter(ones(3), [ones(2), ones(3)]),
        "reduce_scatter: invalid tensor size at index 0: input_list[0] has 2 elements, the output of shape (3,) has 3",
    ),
    "a root outside": (
        lambda g: g.broadcast([ones(1)], broadcast_options(2)),
        "broadcast: invalid root rank: src is 2, the group has ranks 0 to 1",
    ),
    "a root below zero": (
        lambda g: g.gather([], [ones(1)], gather_options(-1)),
        "gather: invalid root rank: dst is -1, the group has ranks 0 to 1",
    ),
    "no list at the destination": (
        lambda g: g.gather([], [ones(1)], gather_options(0)),
        "gather: requires a single-element output list on the dst rank, got 0 lists",
    ),
    "a list elsewhere": (
        lambda g: g.gather([[ones(1), ones(1)]], [ones(1)], gather_options(1)),
        "gather: requires empty output on non-root: only rank 1 (dst) takes outputs, but rank 0 passed some",
    ),
    "parts of different sizes": (
        lambda g: dist.scatter(ones(3), [ones(3), ones(2)], 0),
        "scatter: invalid tensor size at index 1: scatter_list[1] has 2 elements, the tensor of shape (3,) has 3",
    ),
    "no inputs": (lambda g: g.alltoall([], []), "all_to_all: no input tensors, the group has 2 ranks"),
    "rows that cannot be shared": (
        lambda g: dist.all_to_all_single(ones(3), ones(3)),
        "all_to_all_single: the input has 3 rows, which cannot be split equally over 2 ranks",
    ),
    "splits that do not add up": (
        lambda g: g.all_to_all_single(ones(4), ones(4), [2, 2], [1, 2]),
        "all_to_all_single: split sizes [1, 2] do not fit the input, which has 4 rows",
    ),
    "too many splits": (
        lambda g: g.all_to_all_single(ones(4), ones(4), [2, 1, 1], [2, 2]),
        "all_to_all_single: 3 split sizes for the output, the group has 2 ranks",
    ),
    "an output of another length": (
        lambda g: dist.all_to_all_single(ones(4), ones(6)),
        "all_to_all_single: the output has 4 elements, the input 6; pass split sizes if they differ",
    ),
    "a tensor without rows": (
        lambda g: dist.all_to_all_single(torch.tensor(1.0), torch.tensor(1.0)),
        "all_to_all_single: the input has no dimension to split along",
    ),
    "two dtypes": (
        lambda g: g.all_to_all_single(ones(4).double(), ones(4), [], []),
        "all_to_all_single: the output is torch.float64, the input is torch.float32",
    ),
    "a message to oneself": (lambda g: g.send([ones(1)], 0, 0), "send: dst is 0, which is this rank itself"),
    "a message from nobody": (lambda g: g.recv([ones(1)], 5, 0), "recv: src is 5, the group has ranks 0 to 1"),
}


def test_wrong_calls_are_refused_by_name_and_the_group_works_on():
    def check(rank, world_size):
        found = {}
        if rank == 0:
            for name, (call, _) in WRONG.items():
                with pytest.raises(ValueError) as caught:
                    call(dist.group.WORLD)
                assert isinstance(caught.value, RuntimeError), name  # which Gloo raises
                found[name] = str(caught.value)
            with pytest.raises(TypeError, match=r"allreduce\(\): incompatible function arguments[\s\S]*list of str\)"):
                dist.group.WORLD.allreduce(["text"])
        tensor = ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 3
        return found

    found = run_ranks(check, 2)[0]
    for name, (_, text) in WRONG.items():
        assert text in found[name], name


@on_ranks(1)
def test_a_receive_from_anybody_needs_somebody():
    with pytest.raises(ValueError, match="recv: the group has one rank"):
        dist.recv(ones(1))


def test_an_unknown_reduction_lists_the_known_ones():
    for op in ("sum", 99, None):
        with pytest.raises(
            ValueError, match=r"all_reduce: unknown reduction .*; use SUM, AVG, PRODUCT.* or PREMUL_SUM"
        ):
            reduction_of(op, torch.float32, "all_reduce")


def test_only_a_timeout_that_somebody_set_counts():
    options = c10d.AllreduceOptions()
    assert timeout_of(options, 7.0) == 7.0
    assert timeout_of(None, 7.0) == 7.0
    options.timeout = timedelta(milliseconds=-1)
    assert timeout_of(options, 7.0) == 7.0
    options.timeout = timedelta(seconds=2.5)
    assert timeout_of(options, 7.0) == 2.5


def test_rows_are_views_and_sizes_may_be_zero():
    tensor = torch.arange(6.0).view(3, 2)
    parts = split_rows(tensor, [0, 3, 0], 3, "op", "it")
    assert [tuple(p.shape) for p in parts] == [(0, 2), (3, 2), (0, 2)]
    assert parts[1].data_ptr() == tensor.data_ptr()
    with pytest.raises(ValueError, match=r"op: split sizes \[-1, 4, 0\] do not fit it, which has 3 rows"):
        split_rows(tensor, [-1, 4, 0], 3, "op", "it")


@pytest.mark.filterwarnings("ignore:.*will be deprecated:FutureWarning")
@on_ranks(1)
def test_lists_of_other_lengths_are_refused_before_anything_is_gathered(rank):
    """Shorter ones were an IndexError of ours, and the end of longer ones was never written."""
    inputs = [torch.ones(2), torch.ones(3)]
    for outputs in ([torch.zeros(2)], [torch.zeros(2), torch.zeros(3), torch.zeros(4)]):
        with pytest.raises(ValueError, match=r"output_lists\[0\] has \d tensors, but there are 2 input tensors"):
            dist.all_gather_coalesced([outputs], inputs)
