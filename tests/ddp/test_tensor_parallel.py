"""A tensor-parallel model under DistributedDataParallel: its DTensors are local parameters, as in PyTorch's wrapper.

The constructor failed in `torch.cat` of tensors and DTensors. PyTorch's wrapper over Gloo is the reference.
"""

import pytest
import torch
from tests.parity.beside_gloo import compare
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import phalanx
from phalanx.testing import run_ranks


def _train(rank, world_size, wrapper):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.LayerNorm(4))
    model = parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ddp = wrapper(model, device_mesh=mesh["data"])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + mesh["data"].get_local_rank())
        loss = (ddp(torch.randn(5, 8, generator=generator)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, {name: parameter.detach().clone() for name, parameter in ddp.named_parameters()}


@pytest.mark.slow
def test_a_tensor_parallel_model_trains_as_under_pytorchs_wrapper_over_gloo():
    ours = run_ranks(_train, 4, phalanx.DistributedDataParallel)
    theirs = run_ranks(_train, 4, nn.parallel.DistributedDataParallel, backend="gloo")
    compare(ours, theirs, 1e-6)
    assert ours[0][0] != ours[2][0]  # ranks along "data" have other batches
