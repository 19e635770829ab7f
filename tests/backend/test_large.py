"""Tensors of more bytes than 31 bits count: every size and offset on the way through the core is 64 bits wide."""

import os

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks

import phalanx

SIZE = 2 * 2**30 + 4
PLACES = (0, 2**31 - 1, 2**31, SIZE - 1)


def _free_bytes():
    if not os.path.exists("/proc/meminfo"):
        return 0
    with open("/proc/meminfo") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable:"))


def _mark(tensor, values):
    """Write to the few places that are looked at: nothing else of the tensor matters, so nothing else costs time."""
    for place, value in zip(PLACES, values, strict=True):
        if place < len(tensor):
            tensor[place] = value


def _seen(tensor):
    return [int(tensor[place]) for place in PLACES if place < len(tensor)]


@pytest.mark.slow
@pytest.mark.skipif(_free_bytes() < 10 * 2**30, reason="needs 10 GiB of free memory")
@on_ranks(2)
def test_tensors_over_two_gib_arrive_whole_at_both_sides_of_the_limit(rank):
    tensor = torch.empty(SIZE, dtype=torch.uint8)  # one for everything: new pages are most of the time
    odd = tensor[:-1]
    _mark(odd, (1 + rank, 2 + rank, 3 + rank, 0))
    odd[-1] = 4 + rank
    dist.all_reduce(odd)
    assert [*_seen(odd), int(odd[-1])] == [3, 5, 7, 9]

    _mark(tensor, (10 + rank, 20 + rank, 30 + rank, 40 + rank))
    dist.broadcast(tensor, 1)
    assert _seen(tensor) == [11, 21, 31, 41]

    _mark(odd, (50 + rank, 60 + rank, 70 + rank, 0))
    dist.send(odd, 1) if rank == 0 else dist.recv(odd, 0)
    assert _seen(tensor) == [50, 60, 70, 41]

    half = tensor[rank * SIZE // 2 : (rank + 1) * SIZE // 2]
    half[0], half[-1] = 80 + rank, 90 + rank
    dist.all_gather_single(tensor, half)
    assert [int(tensor[at]) for at in (0, SIZE // 2 - 1, SIZE // 2, SIZE - 1)] == [80, 90, 81, 91]
    del tensor, odd, half

    shared = phalanx.shared_empty(SIZE, dtype=torch.uint8)
    _mark(shared, (1 + rank, 2 + rank, 3 + rank, 4 + rank))
    dist.all_reduce(shared)
    assert _seen(shared) == [3, 5, 7, 9]
