"""CUDA tensors through the group "phalanx". Run on a machine with one GPU or more by `pytest -m gpu`.

World size 1; with two GPUs or more two ranks exchange CUDA tensors. Ranks that share a GPU are in tests/gpu.
"""

import os

import pytest
import torch
import torch.distributed as dist
from tests.gpu.collectives import SINGLE

import phalanx
from phalanx._comm.backend.device_backends import is_nccl_available
from phalanx.testing import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_nccl_available(), reason="no CUDA device, or a PyTorch without NCCL"),
]
# The question whether there is a GPU has initialised CUDA in this process, and a fork of it could not use the GPU.
SPAWN = {"start": "spawn", "timeout": 110.0}


def _mine(rank: int) -> torch.device:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _everything(rank, world_size):
    device = _mine(rank)
    one = torch.full((3,), float(rank + 1), device=device)

    def like(n=3):
        return torch.zeros(n, device=device)

    group = dist.group.WORLD
    dist.all_reduce(total := one.clone())
    dist.all_reduce(later := one.clone(), async_op=True).wait()
    dist.broadcast(first := one.clone(), 0)
    dist.reduce(reduced := one.clone(), 0)
    dist.all_gather(parts := [like() for _ in range(world_size)], one)
    getattr(group, SINGLE["all_gather_single"])(gathered := like(3 * world_size), one).wait()
    dist.reduce_scatter(scattered := like(), [one] * world_size)
    getattr(group, SINGLE["reduce_scatter_single"])(half := like(1), torch.ones(world_size, device=device)).wait()
    dist.all_to_all_single(swapped := like(world_size), torch.ones(world_size, device=device))
    dist.all_reduce(on_cpu := torch.ones(2))  # in between, in memory
    dist.barrier()
    dist.barrier(device_ids=[device.index])
    objects = [None] * world_size
    dist.all_gather_object(objects, rank)
    torch.cuda.synchronize()
    del reduced
    results = (total, later, first, parts[-1], gathered, scattered, half, swapped, on_cpu)
    return [t.tolist() for t in results], objects, [d.type for d in group._device_types]


def _check(world_size):
    total = world_size * (world_size + 1) / 2
    for results, objects, kinds in run_ranks(_everything, world_size, **SPAWN):
        assert results == [
            [total] * 3,
            [total] * 3,
            [1.0] * 3,
            [float(world_size)] * 3,
            [float(r + 1) for r in range(world_size) for _ in range(3)],
            [total] * 3,
            [float(world_size)],
            [1.0] * world_size,
            [float(world_size)] * 2,
        ]
        assert objects == list(range(world_size))
        assert kinds == ["cpu", "cuda"]


def test_one_rank_uses_every_collective_on_cuda_and_cpu_tensors() -> None:
    _check(1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes one rank per GPU, and there is one GPU")
def test_two_ranks_exchange_cuda_tensors() -> None:
    _check(2)


def _train(rank, world_size):
    device = _mine(rank)
    trained = []
    for wrap in (lambda model: model, phalanx.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel):
        torch.manual_seed(0)
        model = wrap(torch.nn.Linear(4, 2).to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(device)
            model(inputs).square().mean().backward()
            optimizer.step()
        trained.append([parameter.detach().cpu() for parameter in model.parameters()])
    return [all(map(torch.equal, trained[0], other)) for other in trained[1:]]


def test_a_model_on_a_gpu_trains_as_the_bare_one() -> None:
    assert run_ranks(_train, 1, **SPAWN) == [[True, True]]


@pytest.mark.parametrize("backend", ["cpu:phalanx,cuda:nccl", "cuda:nccl,cpu:phalanx"])
def test_nccl_by_name_beside_phalanx_is_the_same(backend) -> None:
    results, _, kinds = run_ranks(_everything, 1, backend=backend, **SPAWN)[0]
    assert results[0] == [1.0] * 3
    assert kinds == ["cpu", "cuda"]


def _with_a_device(rank, world_size, path):
    store = dist.FileStore(path, world_size)
    device = torch.device("cuda", 0)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=world_size, device_id=device)
    dist.all_reduce(total := torch.ones(2, device=device))
    dist.all_reduce(torch.ones(2))
    pair = dist.new_group([0])
    dist.all_reduce(total, group=pair)
    dist.destroy_process_group()
    return total.tolist()


def test_a_device_id_may_be_given(tmp_path) -> None:
    assert run_ranks(_with_a_device, 1, os.fspath(tmp_path / "store"), init=False, **SPAWN) == [[1.0, 1.0]]
