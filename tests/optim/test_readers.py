"""A rank that loads into parameters that all ranks share waits for ranks that still read them."""

import copy
import logging
import random
import time

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel

from phalanx import DistributedDataParallel, ZeroRedundancyOptimizer
from phalanx.optim import shared_parameters
from phalanx.testing import run_ranks

_DELAYS_S = (0, 0, 0.03)


def _swap_averages(rank, world_size, seed, offload):
    """Train with averaged weights that are loaded for each evaluation, on ranks of which now one is late, now another.

    Return what each rank has read and trained, with an optimizer of its own and with one that ranks share.
    """
    found = []
    for shares in (False, True):
        delays = random.Random(100 * seed + rank)

        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 20))
        wrapper = DistributedDataParallel(model, check=False)
        average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7))
        options = {"lr": 0.1, "momentum": 0.9}
        if shares:
            more = [nn.Parameter(torch.ones(3))]
            optimizer = ZeroRedundancyOptimizer(model[0].parameters(), torch.optim.SGD, offload=offload, **options)
            optimizer.add_param_group({"params": [*model[2].parameters(), *more], "lr": 0.05})
        else:
            groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}]
            optimizer = torch.optim.SGD(groups, **options)
        inputs, seen = torch.randn(6, 30), []
        for _ in range(6):
            optimizer.zero_grad()
            wrapper(inputs + rank).pow(2).mean().backward()
            optimizer.step()
            time.sleep(delays.choice(_DELAYS_S))
            average.update_parameters(model)
            time.sleep(delays.choice(_DELAYS_S))
            backup = copy.deepcopy(model.state_dict())
            model.load_state_dict(average.module.state_dict())
            time.sleep(delays.choice(_DELAYS_S))
            with torch.no_grad():
                seen.append(model(inputs).sum().item())
            time.sleep(delays.choice(_DELAYS_S))
            model.load_state_dict(backup)
        found.append((seen, torch.cat([p.detach().reshape(-1) for p in model.parameters()])))
        dist.barrier()
    (own, weights), (shared, same) = found
    return torch.allclose(torch.tensor(own), torch.tensor(shared), rtol=1e-4), torch.equal(weights, same)


@pytest.mark.slow(but=("0-2",))
@pytest.mark.parametrize(("seed", "world_size"), [(0, 2), (1, 3), (2, 2)])
def test_averages_are_swapped_in_and_out_as_with_parameters_of_ones_own(seed, world_size):
    """A rank that was late kept the averages of the first one as its backup, and wrote them over the weights."""
    assert run_ranks(_swap_averages, world_size, seed, False) == [(True, True)] * world_size


def test_offloaded_parameters_are_each_ranks_own():
    assert run_ranks(_swap_averages, 2, 5, True) == [(True, True)] * 2


@pytest.mark.parametrize("loads", [1, 3])
@on_ranks(3)
def test_one_rank_loads_while_the_others_wait_for_it(rank, world_size, loads):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("phalanx").addHandler(handler)
    torch.manual_seed(0)
    model = nn.Linear(20, 20)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for number in range(3):
        if rank == number % world_size:
            for _ in range(loads):
                model.load_state_dict({name: torch.full_like(t, number) for name, t in model.state_dict().items()})
        dist.barrier()
        assert model.weight.eq(number).all()
        model.load_state_dict({name: torch.full_like(t, 10 + number) for name, t in model.state_dict().items()})
        assert model.weight.eq(10 + number).all()
        dist.barrier()
    assert optimizer.param_groups
    assert messages == []


def _leave_one_alone(rank, world_size):
    shared_parameters._TIMEOUT_S = 0.2
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("phalanx").addHandler(handler)
    model = nn.Linear(2, 2)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    assert optimizer.param_groups
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        store.set("loaded", "1")
    else:
        store.wait(["loaded"])  # not in a collective: nobody can know that it reads nothing
    dist.barrier()
    return messages


def test_a_rank_that_comes_to_no_load_is_named_and_the_load_goes_on():
    told, nothing = run_ranks(_leave_one_alone, 2)
    assert nothing == []
    assert len(told) == 1
    assert "load_state_dict on rank 0: all ranks of this host share the parameters, and rank 1 may still" in told[0]
