"""PyTorch's PowerSGD and local SGD between hosts, where their fewer bytes count: counted at the interface."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import phalanx
from phalanx.testing import why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())

HOOKS = {
    "none": lambda: None,
    "power": lambda: (PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook),
}
STEPS = 3


def compressed_steps(rank, world_size, machines):
    """What leaves all hosts in the third step with each hook; every rank must hold the same gradients after it."""
    bytes_sent = {}
    for name, make in HOOKS.items():
        torch.manual_seed(0)
        ddp = phalanx.DistributedDataParallel(nn.Linear(400, 500), check=False)
        made = make()
        if made:
            ddp.register_comm_hook(*made)
        for step in range(STEPS):
            if step == STEPS - 1:
                dist.barrier()
                before = sum(machine.bytes_sent() for machine in machines)
                dist.barrier()
            ddp.zero_grad()
            ddp(
                torch.randn(8, 400, generator=torch.Generator().manual_seed(10 * step + rank))
            ).square().sum().backward()
        dist.barrier()
        bytes_sent[name] = sum(machine.bytes_sent() for machine in machines) - before
        gradients = [torch.empty_like(ddp.module.weight) for _ in range(world_size)]
        dist.all_gather(gradients, ddp.module.weight.grad)
        assert all(torch.equal(one, gradients[0]) for one in gradients), name
    return bytes_sent


def apart(rank, world_size, machines):
    torch.manual_seed(rank)
    model = nn.Linear(40, 50)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with phalanx.DiLoCo(model, inner, outer, sync_every=2):
        for _ in range(3 + rank):
            inner.zero_grad()
            model(torch.randn(4, 40)).square().mean().backward()
            inner.step()
    return model.weight.detach()


def test_power_sgd_sends_fewer_bytes_between_hosts_and_leaves_the_same_bits():
    sent = on_hosts((1, 1), compressed_steps)[0]
    assert sent["power"] < 0.1 * sent["none"]


@pytest.mark.slow
def test_where_some_ranks_share_a_host_power_sgd_and_training_apart_leave_the_same_bits():
    def both(rank, world_size, machines):
        compressed_steps(rank, world_size, machines)
        return apart(rank, world_size, machines)

    ended = on_hosts((2, 1), both)
    assert all(torch.equal(one, ended[0]) for one in ended)
