"""A group of one rank: DistributedDataParallel costs nothing, and refuses what it refuses on several ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.on_ranks import on_ranks
from tests.small_models import batch_of, mlp
from tests.training import copy_gradients
from torch import nn

from phalanx import DistributedDataParallel


class Shared(nn.Module):
    """Its two gradients are one piece of memory, as autograd makes them for a batch of one sample."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = (nn.Parameter(torch.ones(8)) for _ in range(3))

    def forward(self, x):
        return x + self.a.unsqueeze(0) + self.b.unsqueeze(0)


def _losses(model, steps=4, **step):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(steps):
        x = batch_of(0, number, shape=(16, 32))
        optimizer.zero_grad(**step)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


SIZES = (32, 64, 4)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("as_view", [True, False])
@on_ranks(1)
def test_one_rank_trains_to_the_bits_of_the_module_alone_and_sends_nothing(set_to_none, as_view, monkeypatch):
    calls = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: calls.append(1) or all_reduce(*args, **kwargs))
    ddp = DistributedDataParallel(mlp(SIZES), gradient_as_bucket_view=as_view)
    losses = _losses(ddp, set_to_none=set_to_none)
    assert losses == _losses(mlp(SIZES), set_to_none=set_to_none)
    assert not calls


@on_ranks(1)
def test_gradients_stay_where_autograd_wrote_them():
    ddp = DistributedDataParallel(mlp(SIZES))
    for _ in range(2):
        ddp.zero_grad()
        written: list[int] = []
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda p, to=written: to.append(p.grad.data_ptr()))
            for parameter in ddp.parameters()
        ]
        ddp(torch.ones(2, 32)).sum().backward()
        assert sorted(written) == sorted(parameter.grad.data_ptr() for parameter in ddp.parameters())
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_gradients_that_autograd_made_in_one_piece_of_memory_are_added_to_apart(world_size):
    ddp = DistributedDataParallel(Shared(), find_unused_parameters=True)
    ddp(torch.zeros(1, 8)).sum().backward()
    with ddp.no_sync():
        (2 * ddp(torch.zeros(1, 8))).sum().backward()
    a, b, unused = [ddp.module.a.grad, ddp.module.b.grad, ddp.module.unused.grad]
    assert torch.equal(a, torch.full((8,), 3.0))
    assert torch.equal(b, torch.full((8,), 3.0))
    assert unused is None


@on_ranks(1)
def test_what_several_ranks_refuse_is_refused():
    ddp = DistributedDataParallel(mlp(SIZES))
    with pytest.raises(RuntimeError, match=r"create_graph=True.*is refused"):
        ddp(torch.ones(2, 32)).sum().backward(create_graph=True)
    ddp = DistributedDataParallel(nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}))
    ddp.module.forward = lambda x: ddp.module["a"](x)
    with pytest.raises(RuntimeError, match=r"b\.weight"):
        ddp(torch.ones(2, 8)).sum().backward()


@on_ranks(1)
def test_a_hook_still_sees_each_bucket():
    model = mlp(SIZES)
    plain, ddp = copy.deepcopy(model), DistributedDataParallel(model)
    seen = []

    def halve(state, bucket):
        seen.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer() / 2)
        return future

    ddp.register_comm_hook(None, halve)
    x = torch.ones(2, 32)
    ddp(x).sum().backward()
    plain(x).sum().backward()
    assert seen
    assert_equal(copy_gradients(ddp), [gradient / 2 for gradient in copy_gradients(plain)])
