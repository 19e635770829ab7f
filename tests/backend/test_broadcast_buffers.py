"""A broadcast for which the root waits for nobody: values, order and errors are those of any, told a call later.

Before every forward of a training step DistributedDataParallel makes rank 0's buffers everybody's. As an ordinary
broadcast that held all ranks until the slowest had come, which for a small ResNet took back what the shared memory
had won: 0.96 of PyTorch's step, and 1.20 in the worst round.
"""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks

from phalanx._comm.backend import shared_empty
from phalanx._comm.backend.shared_reducer import SharedReducer
from phalanx.errors import DeadlineError, MismatchError, PeerLostError
from phalanx.testing import run_ranks

STAGE = 128 * 1024


def _broadcast(tensor, root=0, number=0):
    dist.group.WORLD.broadcast_buffers(tensor, root, number=number)


def _meet_after(call=lambda: _broadcast(torch.ones(8)), group=None):
    """Those who waited for nobody hear of what was wrong at the next collective."""
    call()
    dist.barrier(group)


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_every_rank_gets_the_roots_values_at_any_size_and_pace(rank, world_size):
    for step in range(40):
        for size in (0, 1, 17, STAGE, STAGE + 1, 5 * STAGE + 3):
            root = step * 7 % world_size
            tensor = torch.full((size,), (step * 10 + rank) % 251, dtype=torch.uint8)
            _broadcast(tensor, root, step)
            assert bool((tensor == (step * 10 + root) % 251).all()), (step, size)
        if step % 8 == 0:
            total = torch.ones(3)
            dist.all_reduce(total)
            assert total.tolist() == [world_size] * 3
    columns = torch.full((4, 3), float(rank)).t()
    _broadcast(columns[:, ::2], world_size - 1)
    assert columns.tolist() == [[world_size - 1.0, rank, world_size - 1.0, rank]] * 3


@on_ranks(3)
def test_the_root_waits_for_nobody_and_the_others_for_the_root_alone(rank):
    # Rank 1 comes once rank 0 and rank 2 have told it that they are through, which no ordinary broadcast allows.
    for size in (10, STAGE + 1):
        _broadcast(torch.zeros(size, dtype=torch.uint8))  # where the large one's areas are allocated
        dist.barrier()
        tensor = torch.full((size,), rank, dtype=torch.uint8)
        if rank == 1:
            for src in (0, 2):
                dist.recv(torch.zeros(1), src)
        _broadcast(tensor)
        assert not tensor.any()
        if rank != 1:
            dist.send(torch.zeros(1), 1)


# What rank 1 does in the place of the others' broadcast_buffers, and how its call is told.
INSTEAD = {
    "all_reduce": (lambda: dist.all_reduce(torch.ones(8)), "all_reduce(SUM) of float32 (8,)"),
    "broadcast": (lambda: dist.broadcast(torch.ones(8), 0), "broadcast(src=0) of float32 (8,)"),
    "another size": (lambda: _broadcast(torch.ones(9)), "broadcast_buffers(src=0) of float32 (9,)"),
    "another root": (lambda: _broadcast(torch.ones(8), 1), "broadcast_buffers(src=1) of float32 (8,)"),
    "another number": (lambda: _broadcast(torch.ones(8), 0, 5), "broadcast_buffers(src=0) of float32 (8,)"),
}


@pytest.mark.slow(but=("another root", "broadcast"))
@pytest.mark.parametrize("instead", INSTEAD)
@on_ranks(3)
def test_a_rank_that_calls_something_else_is_named_on_every_rank(rank, instead):
    call, words = INSTEAD[instead]
    dist.barrier()
    with pytest.raises(MismatchError) as caught:
        _meet_after(call) if rank == 1 else _meet_after()
    text, calls = str(caught.value), caught.value.calls
    name = words.partition("(")[0] if rank == 1 else "broadcast_buffers"
    assert text.startswith(f"{name} #2 in group '0' on rank {rank}: the ranks' calls do not match; some buffers")
    assert calls[1].startswith(words)
    others = {0, rank} - {1}  # rank 2 may not have come when rank 1 sees that its call is not the root's
    assert all(calls[r].startswith("broadcast_buffers(src=0) of float32 (8,) at tests/backend/") for r in others)


@on_ranks(3)
def test_who_stands_at_the_end_of_a_round_of_gradients_by_then_hears_it_there(rank):
    reducer = SharedReducer(dist.group.WORLD, [shared_empty(10).fill_(1.0)], dist.ReduceOp.AVG)
    reducer.begin()
    if rank != 1:
        _broadcast(torch.ones(8))
        reducer.ready(0)
    with pytest.raises(MismatchError) as caught:
        dist.all_reduce(torch.ones(8)) if rank == 1 else reducer.finish()
    assert [caught.value.calls[r].partition("(")[0] for r in (0, 1)] == ["broadcast_buffers", "all_reduce"]


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_instead_is_named(dying):
    def check(rank, world_size):
        dist.barrier()
        if rank == dying:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError) as caught:
            _meet_after()
        return str(caught.value), caught.value.ranks

    for rank, answer in enumerate(run_ranks(check, 3, lost=(dying,))):
        if rank != dying:
            text, lost = answer
            assert lost == (dying,)
            assert text.startswith(f"broadcast_buffers #2 in group '0' on rank {rank}: rank {dying} (pid ")


def test_a_rank_that_never_comes_is_named_when_time_is_up():
    def check(rank, world_size):
        missing = []
        for late in (0, 1):
            group = dist.new_group()
            group.set_timeout(timedelta(seconds=0.5))  # for what is to fail, not for what leads to it
            if rank != late:
                with pytest.raises(DeadlineError) as caught:
                    _meet_after(lambda: group.broadcast_buffers(torch.ones(8), 0), group)  # noqa: B023
                assert "broadcast_buffers #1 in group" in str(caught.value)
                missing.append(late in caught.value.missing)
            dist.barrier()
        return missing

    assert run_ranks(check, 3) == [[True], [True], [True, True]]


def test_it_takes_its_place_among_the_groups_collectives():
    def check(rank, world_size):
        for step in range(50):
            first, second = torch.full((100_000,), float(rank + step)), torch.full((5,), float(rank + step))
            work = dist.all_reduce(first, async_op=True)
            _broadcast(second, 1, step)
            later = dist.all_reduce(second, async_op=True)
            work.wait()
            later.wait()
            assert first[0] == first[-1] == world_size * step + sum(range(world_size))
            assert second.tolist() == [world_size * (1.0 + step)] * 5
        records = dist.group.WORLD.symm_mem.core.records(rank)
        return [record[0] for record in records if record[1] == 13][-3:]

    numbers = run_ranks(check, 3)
    assert numbers[0] == numbers[1] == numbers[2]
    assert [b - a for a, b in zip(numbers[0], numbers[0][1:], strict=False)] == [3, 3]
