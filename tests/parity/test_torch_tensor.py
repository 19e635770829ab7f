"""DeviceMesh, DTensor, tensor parallelism and functional collectives over the backend."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.parity.beside_gloo import assert_same_as_gloo
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

# Of the names that torch 2.13 deprecates, the older are what people use.
older_names = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")


@older_names
@pytest.mark.parametrize("world_size", [3])
def test_functional_collectives_give_what_gloo_gives(world_size):
    def call(rank, world_size):
        group = dist.group.WORLD
        mine = torch.arange(2.0 * world_size).view(world_size, 2) + 10 * rank
        turned = [world_size - 1] + list(range(world_size - 1))
        results = [
            functional.all_reduce(mine, "sum", group),
            functional.all_reduce(mine, "max", group),
            *functional.all_reduce_coalesced([mine, mine[0]], "sum", group),
            functional.all_gather_tensor(mine, 1, group),
            *functional.all_gather_into_tensor_coalesced([mine, mine * 2], group),
            functional.reduce_scatter_tensor(mine, "sum", 0, group),
            *functional.reduce_scatter_tensor_coalesced([mine], "sum", [0], group),
            functional.all_to_all_single(mine, None, None, group),
            functional.broadcast(mine, world_size - 1, group),
            functional.permute_tensor(mine[0], turned, group),
        ]
        return [functional.wait_tensor(tensor) for tensor in results]  # pickle would not wait

    results = assert_same_as_gloo(call, world_size)
    assert results[0][0].tolist() == results[-1][0].tolist()


@older_names
def test_functional_collectives_carry_gradients():
    def call(rank, world_size):
        mine = (torch.arange(4.0) + rank).requires_grad_()
        gathered = functional.all_gather_tensor_autograd(mine, 0, dist.group.WORLD)
        scattered = functional.reduce_scatter_tensor_autograd(gathered * (rank + 1), "sum", 0, dist.group.WORLD)
        turned = functional.all_to_all_single_autograd(scattered, None, None, dist.group.WORLD)
        (turned * torch.arange(1.0, 5.0)).sum().backward()
        return turned.detach(), mine.grad

    assert_same_as_gloo(call, 2)


@pytest.mark.parametrize("rows", [5])
def test_dtensors_are_placed_moved_and_added_as_over_gloo(rows):
    def call(rank, world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        whole = torch.arange(rows * 4.0).view(rows, 4)
        by_rows = distribute_tensor(whole, mesh, [Shard(0)])
        by_columns = by_rows.redistribute(mesh, [Shard(1)])
        everywhere = by_columns.redistribute(mesh, [Replicate()])
        part = DTensor.from_local(whole + rank, mesh, [Partial()])
        product = torch.mm(by_rows, distribute_tensor(whole.t().contiguous(), mesh, [Replicate()]))
        return (
            by_rows.to_local(),
            by_columns.to_local(),
            everywhere.to_local(),
            part.full_tensor(),
            part.redistribute(mesh, [Shard(0)]).to_local(),
            product.full_tensor(),
            by_rows.sum().full_tensor(),
        )

    results = assert_same_as_gloo(call, 3)
    assert torch.equal(results[2][2], torch.arange(rows * 4.0).view(rows, 4))


def test_a_mesh_of_two_axes_reduces_along_each():
    def call(rank, world_size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sums = {}
        for axis in ("dp", "tp"):
            tensor = torch.tensor([float(2**rank)])
            dist.all_reduce(tensor, group=mesh[axis].get_group())
            sums[axis] = tensor.item()
        flat = mesh["dp", "tp"]._flatten("all")
        tensor = torch.tensor([float(2**rank)])
        dist.all_reduce(tensor, group=flat.get_group())
        sums["all"] = tensor.item()
        sums["place"] = (mesh.get_local_rank("dp"), mesh.get_local_rank("tp"), tuple(mesh.get_coordinate()))
        return sums

    ours = assert_same_as_gloo(call, 4)
    assert [(r["dp"], r["tp"], r["all"]) for r in ours] == [(5, 3, 15), (10, 3, 15), (5, 12, 15), (10, 12, 15)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


@pytest.mark.slow(but=("False",))
@pytest.mark.parametrize("by_sequence", [False, True])
def test_tensor_parallel_layers_give_the_gradients_of_gloo_and_of_one_process(by_sequence):
    def block():
        torch.manual_seed(0)
        return Block()

    inputs = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))

    def train(rank, world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if by_sequence:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Replicate()),
                "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
            }
        model = parallelize_module(block(), mesh, plan)
        out = model(inputs)
        out.square().sum().backward()
        full = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        return [out.detach(), *full]

    alone = block()
    out = alone(inputs)
    out.square().sum().backward()
    ours = assert_same_as_gloo(train, 2, atol=1e-5)
    expected = [out.detach(), *(p.grad for p in alone.parameters())]
    torch.testing.assert_close(ours[0], expected, rtol=1e-5, atol=1e-5)
