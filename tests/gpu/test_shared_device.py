"""Several ranks on one device: the same values, order and errors as on the CPU, whatever the device is.

NCCL refuses two ranks on one GPU, so all of this goes through the host's memory.
"""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.gpu.collectives import all_collectives
from tests.small_models import batch_of, mlp
from tests.training import train
from torch import nn

import phalanx
from phalanx.errors import MismatchError, PeerLostError
from phalanx.testing import RankFailed

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*The operator aten"),  # the simulated device has few kernels of its own
    pytest.mark.filterwarnings("ignore:.*torch.jit"),  # torch.distributed.optim's own
]


def _everything(rank, world_size, place):
    device = place.join(rank, world_size)
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for where in ("cpu", device):
            try:
                results.append(all_collectives(where, dtype, rank, world_size))
            except ValueError as error:  # no mean of whole numbers
                results.append(str(error))
    large = torch.randn(300_007, generator=torch.Generator().manual_seed(rank))
    on_device = large.to(device)
    dist.all_reduce(large)
    dist.all_reduce(on_device)
    return results, torch.equal(large, on_device.cpu())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_collective_leaves_the_bits_that_it_leaves_on_the_cpu(place, world_size):
    for results, same in place.run(_everything, world_size):
        for on_cpu, on_device in zip(results[::2], results[1::2], strict=True):
            assert on_cpu == on_device
        assert len(results[0]) >= 18
        assert same


def _in_order(rank, world_size, place):
    device = place.join(rank, world_size)
    module = torch.get_device_module(device)
    dist.all_reduce(torch.zeros(1, device=device))
    # What the caller's stream has yet to compute is what is reduced.
    slow = torch.zeros(100_000, device=device)
    place.slow_fill(slow, rank + 1.0, 300)
    work = dist.all_reduce(slow, async_op=True)
    work.wait()
    first = slow.sum().item()
    # The same from a stream of the caller's own.
    stream = module.Stream(device=device)
    mine = torch.zeros(64, device=device)
    module.synchronize()
    with module.stream(stream):
        place.slow_fill(mine, rank + 1.0, 100)
        dist.all_reduce(mine)
        second = mine.sum().item()
    # Several in flight, of both kinds of device, in one order.
    tensors = [torch.full((n,), 1.0, device=where) for n in (3, 70_000) for where in ("cpu", device)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    third = [tensor.sum().item() / tensor.numel() for tensor in tensors]
    dist.barrier()
    # What is called with async_op may be changed once it has been waited for, and not before its values were read.
    again = torch.ones(70_000, device=device)
    future = dist.all_reduce(again, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    return first, second, third, doubled.sum().item()


def test_collectives_come_after_what_the_callers_stream_does_and_before_what_it_does_next(place):
    for first, second, third, doubled in place.run(_in_order, 2):
        assert first == 300_000.0
        assert second == 64 * 3.0
        assert third == [2.0] * 4
        assert doubled == 70_000 * 4.0


def _mismatch(rank, world_size, place):
    device = place.join(rank, world_size)
    dist.all_reduce(torch.zeros(1, device=device))
    mine = torch.full((70_000 + rank,), 7.0, device=device)
    with pytest.raises(MismatchError) as caught:
        dist.all_reduce(mine)
    with pytest.raises(ValueError, match="Put all tensors of one call on one device"):
        dist.all_gather([torch.zeros(1), torch.zeros(1, device=device)], torch.zeros(1, device=device))
    return str(caught.value), mine.eq(7.0).all().item()


def test_ranks_that_call_different_things_are_told_and_nothing_is_changed(place):
    for message, unchanged in place.run(_mismatch, 2):
        assert "rank 0: all_reduce(SUM) of float32 (70000,) at " in message
        assert "rank 1: all_reduce(SUM) of float32 (70001,) at " in message
        assert unchanged


def _killed(rank, world_size, place):
    device = place.join(rank, world_size)
    dist.all_reduce(torch.zeros(1, device=device))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        dist.all_reduce(torch.zeros(70_000, device=device))
    return str(caught.value)


def test_a_killed_rank_is_named(place):
    message, _ = place.run(_killed, 2, lost=(1,))
    assert "rank 1" in message


def _out_of_memory(rank, world_size, place):
    device = place.join(rank, world_size)
    dist.all_reduce(torch.zeros(1, device=device))
    if rank == 1:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    dist.all_reduce(torch.zeros(70_000, device=device))


def test_a_rank_that_runs_out_of_the_devices_memory_is_told_with_its_own_error(place):
    with pytest.raises(RankFailed) as caught:
        place.run(_out_of_memory, 2)
    assert isinstance(caught.value.errors[1], RuntimeError)
    assert "out of memory" in str(caught.value.errors[1])
    assert isinstance(caught.value.errors[0], PeerLostError)


def _train(rank, world_size, place, wrap, device):
    model = wrap(mlp((40, 300, 2), activation=nn.ReLU).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [batch_of(rank, step, shape=(8, 40)).to(device) for step in range(4)]
    return [parameter.cpu() for parameter in train(model, optimizer, batches)]


def _both_wrappers(rank, world_size, place):
    device = place.join(rank, world_size)
    wrappers = (phalanx.DistributedDataParallel, nn.parallel.DistributedDataParallel)
    return [[_train(rank, world_size, place, wrap, where) for where in ("cpu", device)] for wrap in wrappers]


def test_models_train_to_what_they_are_on_the_cpu_and_all_ranks_agree(place):
    by_rank = place.run(_both_wrappers, 2)
    for trained, of_rank_0 in zip(by_rank[1], by_rank[0], strict=True):
        for (on_cpu, on_device), (_, first) in zip([trained], [of_rank_0], strict=True):
            assert_equal(on_device, first)
            torch.testing.assert_close(on_cpu, on_device, rtol=1e-4, atol=1e-5)


def _normalize(rank, world_size, place):
    device = place.join(rank, world_size)
    batch = torch.randn(8, 3, 5, generator=torch.Generator().manual_seed(0))
    weights = torch.arange(8.0 * 3 * 5).view(8, 3, 5) / 100
    whole = nn.BatchNorm1d(3)
    expected_in = batch.clone().requires_grad_()
    (whole(expected_in) * weights).sum().backward()
    results = []
    for make in (phalanx.SyncBatchNorm, nn.SyncBatchNorm)[: 2 if device.type == "cuda" else 1]:
        norm = make(3).to(device)
        part = slice(4 * rank, 4 * rank + 4)
        mine = batch[part].to(device).requires_grad_()
        (norm(mine) * weights[part].to(device)).sum().backward()
        torch.testing.assert_close(mine.grad.cpu(), expected_in.grad[part], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(norm.running_var.cpu(), whole.running_var, rtol=1e-4, atol=1e-5)
        results.append(make.__module__)
    return results


def test_sync_batchnorm_normalises_by_the_whole_batch(place):
    assert all(place.run(_normalize, 2))


def _zero(rank, world_size, place):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    device = place.join(rank, world_size)
    trained = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = phalanx.DistributedDataParallel(nn.Linear(30, 4).to(device))
        optimizer = (
            ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)
            if sharded
            else torch.optim.Adam(model.parameters(), lr=0.1)
        )
        batches = [batch_of(rank, step, shape=(4, 30)).to(device) for step in range(3)]
        trained.append([parameter.cpu() for parameter in train(model, optimizer, batches)])
    with pytest.raises(ValueError, match="parameters must be dense and on the CPU"):
        phalanx.ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)
    torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-6)
    return True


def test_torchs_sharded_optimizer_trains_as_the_whole_one(place):
    assert place.run(_zero, 2) == [True, True]


def _checkpoint(rank, world_size, place):
    device = place.join(rank, world_size)
    torch.manual_seed(rank)
    model = phalanx.DistributedDataParallel(nn.Linear(30, 4).to(device))  # rank 0's, on all ranks
    path = os.path.join(place.folder, "model.pt")
    phalanx.save_checkpoint(path, {"model": model.module.state_dict(), "step": 3})
    saved = model.module.weight.detach().cpu()
    on_cpu = phalanx.load_checkpoint(path)["model"]["weight"]
    on_device = phalanx.load_checkpoint(path, map_location=device)["model"]["weight"]
    dist.barrier()
    return (
        on_cpu.device.type,
        on_device.device == device,
        torch.equal(on_cpu, saved),
        torch.equal(on_device.cpu(), saved),
    )


def test_a_checkpoint_of_a_device_is_loaded_on_the_cpu_or_on_the_device(place):
    assert place.run(_checkpoint, 2) == [("cpu", True, True, True)] * 2
