"""An optimizer's state on the host, its parameters on a device: the bits of an update on the processor."""

import copy

import pytest
import torch
import torch.distributed as dist
from tests.small_models import batch_of, mlp
from torch import nn, optim

import phalanx
from phalanx import ZeroRedundancyOptimizer
from phalanx.optim import offload

STEPS = 5


def _model(dtype, device):
    return mlp((40, 300, 7), activation=nn.ReLU).to(dtype).to(device)


def _backward(module, rank, step, dtype, place, device):
    """Behind a kernel that keeps the device busy: what does not wait for it sees old values."""
    inputs = batch_of(rank, step, shape=(4, 40)).to(dtype).to(device)
    place.slow_fill(torch.empty(8, device=device), 1.0, 20)
    module(inputs).square().mean().backward()


def _by_hand(rank, place, device, dtype, wrap):
    """The same training with torch's optimizer on the host, whose parameters are copied there and back in full."""
    module = wrap(_model(dtype, device))
    parameters = list(module.parameters())
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    masters = [nn.Parameter(p.detach().cpu().to(wide)) for p in parameters]
    optimizer = optim.AdamW(masters, lr=0.01, fused=True)
    for step in range(STEPS):
        module.zero_grad()
        if step == 2:
            with module.no_sync():
                _backward(module, rank, 99, dtype, place, device)
        _backward(module, rank, step, dtype, place, device)
        if step == 3:
            nn.utils.clip_grad_norm_(parameters, 0.01)
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad = parameter.grad.cpu().to(wide)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                parameter.copy_(master)
    return [p.detach().cpu() for p in parameters]


def _offloaded(rank, world_size, place):
    device = place.join(rank, world_size)
    offload.WAVE_BYTES = 4096  # many
    results = []
    for wrap in (phalanx.DistributedDataParallel, nn.parallel.DistributedDataParallel):
        for dtype in (torch.float32, torch.bfloat16):
            expected = _by_hand(rank, place, device, dtype, wrap)
            module = wrap(_model(dtype, device))
            optimizer = ZeroRedundancyOptimizer(module.parameters(), optim.AdamW, offload=True, lr=0.01)
            for step in range(STEPS):
                optimizer.zero_grad()
                if step == 2:
                    with module.no_sync():
                        _backward(module, rank, 99, dtype, place, device)
                _backward(module, rank, step, dtype, place, device)
                if step == 3:
                    nn.utils.clip_grad_norm_(module.parameters(), 0.01)
                optimizer.step()
            got = [p.detach().cpu() for p in module.parameters()]
            results.append(all(torch.equal(*pair) for pair in zip(got, expected, strict=True)))
            results.append(all(p.device.type == place.kind for p in module.parameters()))
            results.append(all(master.is_cpu for master in optimizer.optim.param_groups[0]["params"]))
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_are_those_of_an_update_on_the_host_by_hand(place, world_size):
    assert place.run(_offloaded, world_size) == [[True] * 12] * world_size


def _resumed(rank, world_size, place):
    device = place.join(rank, world_size)
    module = phalanx.DistributedDataParallel(_model(torch.bfloat16, device))
    optimizer = ZeroRedundancyOptimizer(module.parameters(), optim.AdamW, offload=True, lr=0.01)

    def train(module, optimizer, first):
        for step in range(first, first + 3):
            optimizer.zero_grad()
            _backward(module, rank, step, torch.bfloat16, place, device)
            norm = optimizer.clip_grad_norm_(0.05)
            optimizer.step()
        return norm, [p.detach().cpu() for p in module.parameters()]

    train(module, optimizer, 0)
    optimizer.consolidate_state_dict(to=0)
    wholes = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(wholes)
    weights = copy.deepcopy(module.state_dict())
    again = phalanx.DistributedDataParallel(_model(torch.bfloat16, device))
    other = ZeroRedundancyOptimizer(again.parameters(), optim.AdamW, offload=True, lr=0.01)
    other.load_state_dict(wholes[0])
    again.load_state_dict(weights)
    results = [train(*pair, 3) for pair in ((module, optimizer), (again, other))]
    plain = _model(torch.bfloat16, device)
    optim.AdamW(plain.parameters()).load_state_dict(wholes[0])
    state_is_here = all(value.is_cpu for state in other.optim.state.values() for value in state.values())
    dist.destroy_process_group()
    return (
        torch.equal(results[0][0], results[1][0]),
        all(torch.equal(*pair) for pair in zip(results[0][1], results[1][1], strict=True)),
        state_is_here,
    )


def test_a_saved_state_goes_on_to_the_bit(place):
    assert place.run(_resumed, 2) == [(True, True, True)] * 2


def _locked(rank, world_size, place):
    """A copy from or to memory that is not page-locked waits for what the device has to do before it."""
    device = place.join(rank, world_size)
    module = phalanx.DistributedDataParallel(_model(torch.bfloat16, device))
    optimizer = ZeroRedundancyOptimizer(module.parameters(), optim.AdamW, offload=True)
    _backward(module, rank, 0, torch.bfloat16, place, device)
    optimizer.step()
    waited = []
    masters = max(optimizer._shared[0].flats, key=len)
    for host in (*optimizer._offload._copies.values(), masters.detach()):
        there = torch.zeros_like(host, device=device)
        for to, source in ((host, there), (there, host)):
            torch.cuda.synchronize()
            place.slow_fill(torch.empty(8, device=device), 1.0, 500)
            after = torch.cuda.Event()
            to.copy_(source, non_blocking=True)
            after.record()
            waited.append(after.query())
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return waited


@pytest.mark.gpu
def test_what_is_copied_is_page_locked(cuda):
    assert cuda.run(_locked, 1) == [[False] * 4]
