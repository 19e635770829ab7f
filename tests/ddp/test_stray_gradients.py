"""A step through a method other than forward.

Its gradients were not averaged, and after the watched steps nothing reported it: the ranks differed by 0.08 after
twelve steps.
"""

import copy

import pytest
import torch
from tests.comparisons import assert_equal
from tests.on_ranks import on_ranks
from tests.small_models import batch_of, mlp
from tests.training import copy_parameters
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx import DistributedDataParallel, check_replicas
from phalanx.testing import run_ranks


class Model(nn.Module):
    """It has a loss beside its forward."""

    def __init__(self):
        super().__init__()
        self.layers = mlp((3, 4, 2))

    def forward(self, batch):
        return self.layers(batch)

    def loss(self, batch):
        return self(batch).square().sum()

    def penalty(self):
        return sum(parameter.square().sum() for parameter in self.parameters())


def _make():
    ddp = DistributedDataParallel(Model())
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.01)


def _batch(rank, step=0):
    return batch_of(rank, step, shape=(4, 3))


@pytest.mark.parametrize("num_steps", [0, 5])
@on_ranks(2)
def test_it_is_refused_before_the_optimizer_steps(rank, backend, num_steps):
    ddp, optimizer = _make()
    for step in range(num_steps):
        optimizer.zero_grad()
        ddp(_batch(rank, step)).sum().backward()
        optimizer.step()
    before = copy_parameters(ddp)
    optimizer.zero_grad()
    ddp.module.loss(_batch(rank)).backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert_equal(before, copy_parameters(ddp))
    message = str(caught.value)
    assert message.startswith(
        f"DistributedDataParallel on rank {rank}: the gradient of 'layers.0.weight' and 3 more was not averaged"
    )
    assert "Call the wrapper, model(inputs)" in message


def _penalize(ddp, optimizer, rank, step):
    """Add a penalty on the parameters, before and after the loss."""
    optimizer.zero_grad()
    if step % 2:
        ddp.module.penalty().backward()
    ddp(_batch(rank, step)).sum().backward()
    ddp.module.penalty().backward()
    optimizer.step()


def _leave_gradients(ddp, optimizer, rank, step):
    """Go through the module for the sake of another model's gradients, as GANs do."""
    ddp.module.loss(_batch(rank, step)).backward()
    optimizer.zero_grad()
    ddp(_batch(rank, step)).sum().backward()
    optimizer.step()
    ddp.module.loss(_batch(rank, step)).backward()
    optimizer.zero_grad()
    optimizer.step()


def _step_with_another(ddp, optimizer, rank, step):
    other = nn.Linear(3, 3)
    ddp.module.loss(other(_batch(rank, step))).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    _penalize(ddp, optimizer, rank, step)


def _accumulate(ddp, optimizer, rank, step):
    optimizer.zero_grad()
    ddp.module.loss(_batch(rank, step)).backward()
    ddp(_batch(rank, step)).sum().backward()
    optimizer.step()


def _go_back_twice(ddp, optimizer, rank, step):
    optimizer.zero_grad()
    loss = ddp(_batch(rank, step)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def _recompute(ddp, optimizer, rank, step):
    optimizer.zero_grad()
    batch = _batch(rank, step).requires_grad_()
    checkpoint(ddp, batch, use_reentrant=step % 2 == 0).sum().backward()
    optimizer.step()


@pytest.mark.slow(but=("_accumulate", "_penalize"))
@pytest.mark.parametrize(
    "take_step",
    [_penalize, _leave_gradients, _step_with_another, _accumulate, _go_back_twice, _recompute],
    ids=lambda function: function.__name__,
)
def test_where_gradients_are_averaged_nothing_is_refused(take_step):
    def fn(rank, world_size):
        ddp, optimizer = _make()
        for step in range(6):
            take_step(ddp, optimizer, rank, step)
        return copy_parameters(ddp)

    first, second = run_ranks(fn, 2)
    assert_equal(first, second)


@on_ranks(2)
def test_within_no_sync_each_rank_may_step_by_itself(rank):
    ddp, optimizer = _make()
    alone = copy.deepcopy(ddp.module)
    alone.loss(_batch(rank)).backward()
    torch.optim.SGD(alone.parameters(), lr=0.01).step()
    with ddp.no_sync():
        ddp.module.loss(_batch(rank)).backward()
    optimizer.step()
    assert_equal(copy_parameters(ddp), copy_parameters(alone))


@on_ranks(1)
def test_one_rank_has_nobody_to_differ_from(rank):
    ddp, optimizer = _make()
    ddp.module.loss(_batch(rank)).backward()
    optimizer.step()


@on_ranks(2)
def test_a_wrapper_of_the_same_parameters_has_averaged_them(rank):
    """Two heads on one encoder: the wrapper that did not run refused the other one's step."""
    encoder, heads = nn.Linear(2, 2), [nn.Linear(2, 1), nn.Linear(2, 1)]
    wrappers = [DistributedDataParallel(nn.Sequential(encoder, head)) for head in heads]
    again = DistributedDataParallel(wrappers[0].module)
    optimizer = torch.optim.SGD([*encoder.parameters(), *heads[0].parameters(), *heads[1].parameters()], lr=0.1)
    for wrapper in (*wrappers, again, wrappers[1]):
        optimizer.zero_grad()
        wrapper(torch.ones(3, 2) * (rank + 1)).sum().backward()
        optimizer.step()
    check_replicas(again)
