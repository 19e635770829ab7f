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


def test_power_sgd_sends_fewer_bytes_between_hosts_and_leaves_the_same_bits():
    sent = on_hosts((1, 1), compressed_steps)[0]
    assert sent["power"] < 0.1 * sent["none"]
