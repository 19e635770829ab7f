"""FSDP2 told to take its buffers from the group (`set_allocate_memory_from_process_group_for_comm`).

It asked `supports_tensor_alloc(device)`, which was an attribute: TypeError. Now it gets memory of the ranks' shared
heap, from which parameters are gathered with one copy in place of two.
"""

import gc

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def _train(group, rank, world_size, *, from_group):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(400, 400) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if from_group:
        for module in (*layers, model):
            module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(8, 400)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.full_tensor() for p in model.parameters()]


@pytest.mark.slow
@on_ranks(2)
def test_fsdp_trains_in_memory_of_the_group_as_it_does_over_gloo(rank, world_size):
    gloo = dist.new_group(backend="gloo")
    expected = _train(gloo, rank, world_size, from_group=False)
    group = dist.group.WORLD
    got = _train(group, rank, world_size, from_group=True)
    assert group._scratch is not None  # FSDP did ask
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(got[1], expected[1])


@pytest.mark.slow(but=("40000",))
@pytest.mark.parametrize("count", [10, 40_000, 300_000])
@on_ranks(3)
def test_a_gather_of_tensors_in_the_heap_is_that_of_any_others(rank, world_size, count):
    """In the heap everywhere, on some ranks only, or nowhere; the input a part of the output, as with FSDP2."""
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert group.supports_tensor_alloc(cpu)
    assert not group.supports_tensor_alloc(torch.device("meta"))
    for where in ("heap", "mixed", "ordinary"):
        for again in range(3):
            if where == "heap" or (where == "mixed" and rank == 0):
                whole = group.allocate_tensor(count * world_size, dtype=torch.float32, device=cpu)
            else:
                whole = torch.empty(count * world_size)
            part = whole.narrow(0, rank * count, count)
            part.copy_(torch.arange(count) + 1000.0 * rank + again)
            group.all_gather_single(whole, part).wait()
            for r, got in enumerate(whole.chunk(world_size)):
                assert torch.equal(got, torch.arange(count) + 1000.0 * r + again)
    address = group.allocate_tensor(count, dtype=torch.float32, device=cpu).data_ptr()
    gc.collect()
    assert group.allocate_tensor(count, dtype=torch.float32, device=cpu).data_ptr() == address  # used again
