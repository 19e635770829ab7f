"""Ranks that call different things hear it, all of them, side by side, and no tensor has changed."""

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch.distributed import ReduceOp

from phalanx._comm.backend import shared_empty
from phalanx._comm.backend.shared_reducer import SharedReducer
from phalanx.errors import MismatchError
from phalanx.testing import run_ranks

BIG = 200_000

# What rank 1 calls, what the others call, and what the message says of both.
CALLS = {
    "operation": (
        lambda t: dist.broadcast(t, 0),
        lambda t: dist.all_reduce(t),
        "broadcast(src=0) of float32 (6,)",
        "all_reduce(SUM) of float32 (6,)",
    ),
    "barrier": (lambda t: dist.barrier(), lambda t: dist.all_reduce(t), "barrier", "all_reduce(SUM) of float32 (6,)"),
    "dtype": (
        lambda t: dist.all_reduce(t.double()),
        lambda t: dist.all_reduce(t),
        "all_reduce(SUM) of float64 (6,)",
        "all_reduce(SUM) of float32 (6,)",
    ),
    "size": (
        lambda t: dist.all_reduce(t[:5]),
        lambda t: dist.all_reduce(t),
        "all_reduce(SUM) of float32 (5,)",
        "all_reduce(SUM) of float32 (6,)",
    ),
    "a large size beside a small one": (
        lambda t: dist.all_reduce(torch.ones(BIG)),
        lambda t: dist.all_reduce(t),
        f"all_reduce(SUM) of float32 ({BIG},)",
        "all_reduce(SUM) of float32 (6,)",
    ),
    "reduction": (
        lambda t: dist.all_reduce(t, ReduceOp.MAX),
        lambda t: dist.all_reduce(t),
        "all_reduce(MAX) of float32 (6,)",
        "all_reduce(SUM) of float32 (6,)",
    ),
    "root": (
        lambda t: dist.broadcast(t, 1),
        lambda t: dist.broadcast(t, 0),
        "broadcast(src=1) of float32 (6,)",
        "broadcast(src=0) of float32 (6,)",
    ),
    "destination": (
        lambda t: dist.reduce(t, 1),
        lambda t: dist.reduce(t, 0),
        "reduce(SUM, dst=1) of float32 (6,)",
        "reduce(SUM, dst=0) of float32 (6,)",
    ),
    "size of a gather": (
        lambda t: dist.all_gather_single(torch.zeros(3, 5), t[:5]),
        lambda t: dist.all_gather_single(torch.zeros(3, 6), t),
        "all_gather of float32 (5,)",
        "all_gather of float32 (6,)",
    ),
    "asynchronous": (
        lambda t: dist.all_reduce(t[:5], async_op=True).wait(),
        lambda t: dist.all_reduce(t, async_op=True).wait(),
        "all_reduce(SUM) of float32 (5,)",
        "all_reduce(SUM) of float32 (6,)",
    ),
    "splits": (
        lambda t: dist.all_to_all_single(torch.zeros(6), t, [2, 2, 2], [1, 2, 3]),
        lambda t: dist.all_to_all_single(torch.zeros(6), t, [2, 2, 2], [2, 2, 2]),
        "all_to_all of float32",
        "all_to_all of float32",
    ),
}


@pytest.mark.slow(but=("operation", "dtype", "size", "asynchronous", "destination"))
@pytest.mark.parametrize("name", CALLS)
@on_ranks(3)
def test_every_rank_is_told_what_each_rank_called_and_where(rank, name):
    odd, even, odd_text, even_text = CALLS[name]
    dist.barrier()
    tensor = torch.full((6,), float(rank))
    with pytest.raises(MismatchError) as caught:
        (odd if rank == 1 else even)(tensor)
    assert isinstance(caught.value, dist.DistBackendError)
    assert tensor.tolist() == [float(rank)] * 6
    with pytest.raises(MismatchError) as again:  # the group is over, and says so again
        dist.barrier()
    assert again.value.calls == caught.value.calls
    message, calls = str(caught.value), caught.value.calls
    assert f" in group '0' on rank {rank}: the ranks' calls do not match; no tensor was changed." in message
    assert list(calls) == [0, 1, 2]
    for r in range(3):
        assert calls[r].startswith(odd_text if r == 1 else even_text), (rank, message)
        assert f"  rank {r}: {calls[r]}\n" in message
        assert "test_mismatch.py:" in calls[r]
    assert "The group can no longer be used." in message


@on_ranks(3)
def test_inputs_of_a_reduction_are_left_alone_at_every_size(rank):
    """Each way through the memory (direct, sliced, in the heap) compares the calls before it writes anything."""
    import phalanx

    for size in (1, 10_000, BIG):
        for shared in (False, True):
            group = dist.new_group()
            tensor = phalanx.shared_empty(size, group=group) if shared else torch.empty(size)
            tensor.fill_(float(rank))
            with pytest.raises(MismatchError):
                dist.all_reduce(tensor, ReduceOp.MAX if rank == 0 else ReduceOp.SUM, group=group)
            assert bool((tensor == rank).all()), (size, shared)
            dist.destroy_process_group(group)


@pytest.mark.parametrize("early", [False, True])
def test_a_message_that_does_not_fit_is_an_error_on_both_sides(early):
    def check(rank, world_size):
        if rank == 0:
            dist.send(torch.ones(5), 1, tag=1)
            if early:
                dist.send(torch.ones(1), 1, tag=2)
            with pytest.raises(MismatchError):
                dist.barrier()
            return None
        if early:
            dist.recv(torch.ones(1), 0, tag=2)
        tensor = torch.zeros(4)
        with pytest.raises(MismatchError) as caught:
            dist.recv(tensor, 0, tag=1)
        assert tensor.tolist() == [0.0] * 4
        return str(caught.value)

    message = run_ranks(check, 2)[1]
    assert "recv from rank 0 in group '0' on rank 1" in message
    assert "rank 1: recv of float32 (4,) at" in message
    assert "rank 0: send of float32 (" in message


def test_the_error_survives_pickling_with_its_fields():
    import pickle

    error = pickle.loads(pickle.dumps(MismatchError("what", calls={0: "a", 1: "b"})))
    assert (str(error), error.calls) == ("what", {0: "a", 1: "b"})


@on_ranks(2)
def test_a_round_of_gradients_beside_a_barrier_shows_both_and_promises_nothing_of_the_gradients(rank):
    # The round was compared with the peer's collective of the same number, since both are counted from 1.
    dist.all_reduce(torch.ones(1))
    reducer = SharedReducer(dist.group.WORLD, [shared_empty(10).fill_(1.0)], dist.ReduceOp.AVG)
    reducer.begin()
    if rank == 0:
        reducer.ready(0)
    with pytest.raises(MismatchError) as caught:
        reducer.finish() if rank == 0 else dist.barrier()
    assert "some gradients may already be averaged" in str(caught.value)
    assert [call.partition(" ")[0] for call in caught.value.calls.values()] == ["gradients", "barrier"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_checkpoint_in_a_thread_of_torchs_is_named_with_what_to_give_it(tmp_path):
    """`dcp.async_save` on the training's group read as if a rank were in another line of the program."""

    def check(rank, world_size):
        import torch.distributed.checkpoint as dcp

        if rank == 1:
            saved = dcp.async_save({"weight": torch.ones(4)}, checkpoint_id=str(tmp_path))
            with pytest.raises(BaseException, match="calls do not match"):
                saved.result()
            return None
        with pytest.raises(MismatchError) as caught:
            dist.all_reduce(torch.ones(3, 5))
        return str(caught.value)

    message, _ = run_ranks(check, 2)
    assert "at a thread of torch/distributed/checkpoint/" in message
    assert "dcp.async_save(..., process_group=dist.new_group())" in message
    assert "if rank == 0" not in message
