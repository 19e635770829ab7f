"""PyTorch's PeriodicModelAverager in shared memory; tests/parity has it beside PyTorch's own."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.optim import PeriodicModelAverager
from phalanx.testing import run_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_averages_at_every_period_after_the_warm_up_and_where_the_parameters_lie(world_size):
    def fn(rank, world_size):
        averager = PeriodicModelAverager(2, warmup_steps=1)
        model = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 1).half(), nn.Linear(1, 1)])
        model.empty = nn.Parameter(torch.zeros(0))
        for parameter in (*model[0].parameters(), *model[1].parameters(), model.empty):
            parameter.grad = torch.zeros_like(parameter)  # the third layer has none, and stays what it is
        places = [parameter.data_ptr() for parameter in model.parameters()]
        for call in range(6):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(rank)
            averager.average_parameters([{"params": list(model.parameters())}] if call % 2 else model.parameters())
            averaged = (world_size - 1) / 2 if call in (1, 3, 5) else rank
            assert all((p == averaged).all() for layer in model[:2] for p in layer.parameters())
            assert model[2].weight == rank
        assert places == [parameter.data_ptr() for parameter in model.parameters()]
        assert averager.step == 6
        model.double()  # gives parameters new memory
        averager.step = 1
        with torch.no_grad():
            model[0].weight.fill_(rank)
        averager.average_parameters(model.parameters())
        assert (model[0].weight == (world_size - 1) / 2).all()
        with pytest.raises(ValueError, match="period must be 1 or more, got 0"):
            PeriodicModelAverager(0)
        with pytest.raises(ValueError, match="warmup_steps must be 0 or more, got -1"):
            PeriodicModelAverager(2, -1, dist.group.WORLD)

    run_ranks(fn, world_size)
