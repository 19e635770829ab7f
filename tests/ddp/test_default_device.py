"""A program that sets another default device trains a model on the CPU as without one."""

import pytest
import torch
from torch import nn

from phalanx import DistributedDataParallel
from phalanx.checkpoint import CheckpointManager, RandomState
from phalanx.optim import ZeroRedundancyOptimizer
from phalanx.testing import run_ranks


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 3, sparse=True, device="cpu")
        self.rest = nn.Sequential(nn.Linear(3, 4, device="cpu"), nn.BatchNorm1d(4, device="cpu"))

    def forward(self, ids):
        return self.rest(self.words(ids))


def _train(rank, world_size, default, folder, sharded):
    """Train, and continue from the checkpoint; return the parameters and buffers after both."""
    torch.manual_seed(rank)
    model = _Model()
    ids = torch.arange(rank, rank + 4)
    if default is not None:
        torch.set_default_device(default)
    ddp = DistributedDataParallel(model)
    optimizers = [
        torch.optim.SGD(model.words.parameters(), lr=0.1),
        ZeroRedundancyOptimizer(model.rest.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
    ]

    def step():
        ddp(ids).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    state = {"model": ddp, "random": RandomState(), **{f"optimizer{i}": one for i, one in enumerate(optimizers)}}
    manager = CheckpointManager(folder, sharded=sharded)
    step()
    manager.save(1, state)
    step()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    manager.load(state)
    step()
    return first, model.state_dict()


@pytest.mark.slow(but=("False",))
@pytest.mark.parametrize("sharded", [False, True])
def test_the_default_device_changes_nothing_for_a_model_on_the_cpu(tmp_path, sharded):
    """The wrap failed with "Tensor on device cpu is not on the expected device meta!": host memory was allocated
    without a device, so on the default one.
    """
    plain, other = (run_ranks(_train, 2, default, tmp_path / str(default), sharded) for default in (None, "meta"))
    for (first, again), (expected, _) in zip(other, plain, strict=True):
        for name, value in expected.items():
            assert first[name].device.type == "cpu"
            assert torch.equal(first[name], value)
            assert torch.equal(again[name], value)
