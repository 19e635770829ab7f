"""PyTorch's distributed checkpoint over the backend: what is saved on some ranks is loaded on others."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.comparisons import assert_equal
from tests.parity.beside_gloo import assert_same_as_gloo
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from phalanx.testing import run_ranks

# torch's planner and its state_dict of optimizers still call parts of torch that it deprecates itself.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def _state(world_size, fill):
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(21.0).view(7, 3) if fill else torch.zeros(7, 3)
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "plain": torch.full((4,), 2.5) if fill else torch.zeros(4),
        "step": 17 if fill else 0,
    }


def _save(rank, world_size, path):
    dcp.save(_state(world_size, True), checkpoint_id=path)


def _save_async(rank, world_size, path):
    dcp.async_save(_state(world_size, True), checkpoint_id=path, process_group=dist.group.WORLD).result()


def _load(rank, world_size, path):
    state = _state(world_size, False)
    dcp.load(state, checkpoint_id=path)
    return state["sharded"].full_tensor(), state["plain"], state["step"]


@pytest.mark.slow(but=("_save",))
@pytest.mark.parametrize("save", [_save, _save_async])
def test_a_checkpoint_of_two_ranks_is_loaded_by_three_and_by_one(tmp_path, save):
    run_ranks(save, 2, str(tmp_path / "checkpoint"))
    for world_size in (3, 1):
        for sharded, plain, step in run_ranks(_load, world_size, str(tmp_path / "checkpoint")):
            assert torch.equal(sharded, torch.arange(21.0).view(7, 3))
            assert torch.equal(plain, torch.full((4,), 2.5))
            assert step == 17


def test_a_checkpoint_written_over_gloo_is_read_over_phalanx_and_the_other_way_round(tmp_path):
    for writer, reader in (("gloo", "phalanx"), ("phalanx", "gloo")):
        path = str(tmp_path / writer)
        run_ranks(_save, 2, path, backend=writer)
        sharded, _, _ = run_ranks(_load, 2, path, backend=reader)[0]
        assert torch.equal(sharded, torch.arange(21.0).view(7, 3))


@pytest.mark.slow
def test_a_sharded_model_and_its_optimizer_come_back(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        model = fully_shard(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)))
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def step(model, optimizer, rank):
        model(torch.ones(2, 3) * (rank + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def interrupt_and_continue(rank, world_size, folder):
        path = f"{folder}/{dist.get_backend()}"
        model, optimizer = build(0)
        step(model, optimizer, rank)
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=path)
        step(model, optimizer, rank)
        expected = [p.full_tensor().detach() for p in model.parameters()]

        model, optimizer = build(1)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step(model, optimizer, rank)
        continued = [p.full_tensor().detach() for p in model.parameters()]
        assert_equal(expected, continued)
        return continued

    assert_same_as_gloo(interrupt_and_continue, 2, str(tmp_path), atol=1e-6)
