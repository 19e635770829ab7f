"""Tensors that another rank reads where they lie, for as long as it likes, and whose memory then comes back."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch import nn
from torch.nn import functional

import phalanx
from phalanx.testing import run_ranks

SIZE = 64 * 1024


def _lending(most=4):
    from phalanx._comm.backend.lending import Lending

    return Lending(dist.group.WORLD, {SIZE: most})


def _tell(value, src):
    told = torch.tensor([value])
    dist.broadcast(told, src=src)
    return int(told)


def test_a_lent_tensor_is_read_where_it_lies():
    def exchange(rank, world_size):
        lending = _lending()
        base = torch.arange(SIZE // 4, dtype=torch.float32)
        if rank == 0:
            with lending.making():
                tensor = base + 1
            place = lending.lend(tensor)
            _tell(place, 0)
            dist.barrier()
            tensor[3] = -7.0  # seen by who borrowed it: there is one memory
            dist.barrier()
            dist.barrier()
            lending.collect()
            return lending.copied, len(lending._lent)
        borrowed = lending.borrow(0, _tell(0, 0), (SIZE // 16, 4), torch.float32)
        same = bool((borrowed.view(-1) == base + 1).all())
        dist.barrier()
        dist.barrier()
        seen = borrowed.view(-1)[3].item()
        del borrowed
        dist.barrier()
        return same, seen

    assert run_ranks(exchange, 2) == [(0, 0), (True, -7.0)]


def test_memory_is_kept_while_anything_uses_it_and_used_anew_afterwards():
    def exchange(rank, world_size):
        lending = _lending(most=1)  # so there is room for two
        weight = torch.ones(4, requires_grad=True)
        places = []
        for turn in range(6):
            if rank == 0:
                tensor = torch.full((SIZE // 16, 4), float(turn))
                place = lending.lend(tensor)
                places.append(-1 if place is None else place)
                del tensor
            place = _tell(places[-1] if rank == 0 else 0, 0)
            if rank == 1 and place >= 0:
                borrowed = lending.borrow(0, place, (SIZE // 16, 4), torch.float32)
                loss = (borrowed * weight).sum()
                del borrowed  # autograd still needs it
                gc.collect()
                loss.backward()
                assert weight.grad.sum() == 4 * turn * SIZE // 16, turn
                weight.grad = None
                del loss
            dist.barrier()
        return len(set(places)), lending.copied

    (distinct, copied), _ = run_ranks(exchange, 2)
    assert distinct <= 2
    assert copied == 6


@on_ranks(2)
def test_without_room_nothing_is_lent():
    lending = _lending(most=1)
    given = [lending.lend(torch.zeros(SIZE // 4)) for _ in range(4)]
    refused = [place is None for place in given]
    small = lending.lend(torch.zeros(3))
    assert refused == [False, False, True, True]
    assert small is None


@on_ranks(2)
def test_tensors_outlive_the_lending_and_the_group():
    lending = _lending()
    with lending.making():
        kept = torch.ones(SIZE // 4)
    assert lending._pool.contains(kept)
    gone = weakref.ref(lending)
    del lending
    gc.collect()
    assert gone() is None
    another = _lending()
    with another.making():
        torch.zeros(SIZE // 4)
    assert kept.sum().item() == SIZE / 4


@pytest.mark.slow(but=("1f1b",))
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_pipeline_copies_no_activation_and_no_gradient(schedule):
    def train(rank, world_size):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(inplace=True), nn.Linear(96, 64))
        pipe = phalanx.Pipeline(
            model, micro_batches=4, schedule=schedule, balance=["2"] if world_size == 2 else ["2", "4"],
            loss_fn=functional.mse_loss,
        )  # fmt: skip
        x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))
        losses = [pipe.step(x, target=x)]
        by_message = sum(pipe._wire.sizes.values())
        for _ in range(3):
            losses.append(pipe.step(x, target=x))
        lending = pipe._wire._lending
        lending.collect()
        assert len(set(map(float, losses))) == 1
        return by_message, sum(pipe._wire.sizes.values()) - by_message, lending.copied

    for world_size in (2, 3):
        ranks = run_ranks(train, world_size)
        assert sum(before for before, _, _ in ranks) == 2 * (world_size - 1) * 4
        assert [after for _, after, _ in ranks] == [0] * world_size
        assert [copied for _, _, copied in ranks] == [0] * world_size
