"""Tensors without dimensions, and expanded ones, which share memory: right, or refused by name."""

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_tensors_without_dimensions(rank, world_size):
    tensor = torch.tensor(float(rank))
    dist.all_reduce(tensor)
    assert tensor.item() == sum(range(world_size))
    outputs = [torch.tensor(-1.0) for _ in range(world_size)]
    dist.all_gather(outputs, torch.tensor(float(rank)))
    assert [o.item() for o in outputs] == list(range(world_size))
    whole = torch.zeros(world_size)
    dist.all_gather_single(whole, torch.tensor(float(rank)))
    assert whole.tolist() == list(range(world_size))
    part = torch.tensor(0.0)
    dist.reduce_scatter_single(part, torch.arange(float(world_size)))
    assert part.item() == world_size * rank


@on_ranks(2)
def test_expanded_tensors_are_read_but_never_written(rank, world_size):
    expanded = torch.tensor([[float(rank)]]).expand(3, 4)
    outputs = [torch.zeros(3, 4) for _ in range(world_size)]
    dist.all_gather(outputs, expanded)
    assert [o.tolist() for o in outputs] == [[[float(r)] * 4] * 3 for r in range(world_size)]

    writers = {
        "all_reduce": lambda: dist.all_reduce(expanded),
        "broadcast": lambda: dist.broadcast(expanded, 0),
        "reduce": lambda: dist.reduce(expanded, 0),
        "all_gather": lambda: dist.all_gather([expanded] * world_size, torch.zeros(3, 4)),
        "all_gather_into_tensor": lambda: dist.all_gather_single(torch.zeros(1, 1).expand(6, 4), torch.zeros(3, 4)),
        "scatter": lambda: dist.scatter(expanded, [torch.zeros(3, 4)] * 2 if rank == 0 else None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(expanded, [torch.zeros(3, 4)] * 2),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_single(expanded, torch.zeros(6, 4)),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(1, 1).expand(2, 4), torch.zeros(2, 4)),
        "recv": lambda: dist.recv(expanded, 1 - rank),
    }
    for name, write in writers.items():
        with pytest.raises(ValueError, match=rf"^{name}: elements of .* share memory") as caught:
            write()
        assert "clone" in str(caught.value)
    dist.barrier()
