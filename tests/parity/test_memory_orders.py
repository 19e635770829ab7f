"""Parameters that lie in memory otherwise on one rank than on another: trained as in one process, or refused.

Gradients, and ZeRO's parameters, travel in the order of memory. A rank whose weight was channels_last (a checkpoint
loaded there alone with assign=True is enough) averaged other elements than the rest, and nobody was told.
"""

import random

import pytest
import torch
from torch import nn

import phalanx
from phalanx.testing import run_ranks

_CASES = 40


class Product(nn.Module):
    """Two weights, on some ranks in the same memory; each element of the first has a gradient of its own."""

    def __init__(self, weight, *, aliased):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.other = nn.Parameter(weight if aliased else weight.clone())

    def forward(self, x):
        return (self.weight.square() * x).sum() + self.other.sum()


def _lay_out(values, draw):
    """The same values with strides of any order, in some cases with gaps."""
    order = list(range(values.dim()))
    draw.shuffle(order)
    back = sorted(range(values.dim()), key=order.__getitem__)
    memory = values.permute(order).contiguous()
    if draw.random() < 0.2:
        memory = torch.stack([memory, memory], -1)[..., 0]
    return memory.permute(back)


def _draw(seed, rank):
    """The model of one rank, and its input: half of the time all lay theirs out alike."""
    draw = random.Random(seed)
    shape = [draw.choice([1, 2, 3, 4]) for _ in range(draw.randint(1, 4))]
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    alike = draw.random() < 0.5
    aliased = not alike and draw.random() < 0.2 and rank == 1
    layout = random.Random(seed if alike else f"{seed} {rank}")
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank))
    return Product(_lay_out(values, layout), aliased=aliased), inputs, alike


def _train_ddp(model, inputs):
    ddp = phalanx.DistributedDataParallel(model)
    for _ in range(2):  # the second backward is over buckets in the order of readiness
        ddp.zero_grad()
        ddp(inputs).backward()
    return ddp.module.weight.detach().clone(), ddp.module.weight.grad.clone()


def _train_zero(model, inputs):
    optimizer = phalanx.ZeroRedundancyOptimizer([model.weight], torch.optim.SGD, lr=0.1)
    model(inputs).backward()
    gradient = model.weight.grad.contiguous()
    torch.distributed.all_reduce(gradient, torch.distributed.ReduceOp.AVG)
    model.weight.grad = gradient
    optimizer.step()
    return model.weight.detach().clone(), model.weight.grad.clone()


def _in_one_process(seed, world_size, *, step):
    weight = _draw(seed, 0)[0].weight.detach().clone()
    gradient = torch.stack([2 * weight * _draw(seed, rank)[1] for rank in range(world_size)]).mean(0)
    return weight - 0.1 * gradient if step else weight, gradient


@pytest.mark.slow(but=("ddp",))
@pytest.mark.parametrize("train", [_train_ddp, _train_zero], ids=["ddp", "zero"])
def test_ranks_whose_strides_differ_train_the_same_numbers_or_are_refused(train):
    def work(rank, world_size):
        outcomes = []
        for seed in range(_CASES):
            model, inputs, _ = _draw(seed, rank)
            try:
                outcomes.append(train(model, inputs))
            except phalanx.MismatchError as error:
                outcomes.append(str(error))
        return outcomes

    refused = 0
    for seed, outcomes in enumerate(zip(*run_ranks(work, 2), strict=True)):
        expected = _in_one_process(seed, 2, step=train is _train_zero)
        if isinstance(outcomes[0], str):
            assert outcomes[0] == outcomes[1]  # all ranks refuse, or none
            assert "strides" in outcomes[0] or "sharing memory with" in outcomes[0]
            assert not _draw(seed, 0)[2], seed
            refused += 1
            continue
        for outcome in outcomes:
            for found, right in zip(outcome, expected, strict=True):
                torch.testing.assert_close(found, right, msg=f"case {seed}: {found} in place of {right}")
    assert 0 < refused < _CASES / 2
