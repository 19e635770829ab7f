"""A forgotten `set_epoch`: the batches of the first steps that come again in their order."""

import itertools

import pytest
import torch
from tests.logs import logged
from tests.on_ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import phalanx
from phalanx import DistributedDataParallel
from phalanx.ddp.epoch_order import MOST_STEPS, NUM_BATCHES, EpochOrder
from phalanx.testing import run_ranks


def _sees(batches):
    """The step at which the order is found to repeat; None if it never is."""
    order = EpochOrder()
    for number, batch in enumerate(batches, 1):
        if order.repeats([batch]):
            assert order.num_steps == number
            return number
    return None


def _numbered(numbers):
    return [torch.full((4, 3), float(number)) for number in numbers]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 8),
        ([1, 2, 3, 1, 2, 3], 6),
        ([1, 2, 3, 4, 1, 2, 1, 2, 3], 9),
        ([1, 2, 3, 4, 1, 1, 2, 3], 8),
        ([1, 2, 3, 4, 2, 3, 1, 4, 3, 1, 2, 4], None),  # the epochs differ
        ([1, 2, 3, 4, 5, 6, 7, 8], None),
        ([1, 1, 1, 1, 1, 1, 1], None),  # one batch: nothing to be said
        ([1, 2, 1, 2, 1, 2, 1, 2], None),
        ([1, 2], None),
        ([], None),
    ],
    ids=str,
)
def test_the_first_three_batches_in_their_order_are_a_repetition(numbers, expected):
    assert _sees(_numbered(numbers)) == expected


def test_it_is_told_once():
    order = EpochOrder()
    assert [order.repeats([batch]) for batch in _numbered([1, 2, 3] * 3)].count(True) == 1


def test_margins_that_are_alike_do_not_make_pictures_alike():
    def picture(number):
        image = torch.zeros(8, 1, 28, 28)
        image[:, :, 10:18, 10:18] = number
        return image

    assert _sees([picture(number) for number in (1, 2, 3, 4, 1, 2, 3)]) == 7
    assert _sees([picture(number) for number in (1, 2, 3, 4, 5, 6, 7)]) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.view(4, 3, 1, 1).contiguous(memory_format=torch.channels_last),
        lambda x: x.t(),
        lambda x: x[:0],
        lambda x: x[0, 0],
        lambda x: x.to(torch.int64),
        lambda x: x.to(torch.complex64),
        lambda x: x.expand(2, 4, 3),
    ],
)
def test_tensors_of_every_form_can_be_looked_at(change):
    batches = [change(batch) for batch in _numbered([1, 2, 3, 4, 1, 2, 3])]
    assert _sees(batches) == (None if batches[0].numel() == 0 else 7)


@pytest.mark.parametrize(
    "strange",
    [
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(4, 3)[:, ::2],
        list(range(2000)),
    ],
    ids=["meta", "sparse", "nested", "float8", "gaps", "many objects"],
)
def test_what_can_not_be_looked_at_cheaply_is_not(strange):
    assert _sees([*_numbered([1, 2, 3]), strange, *_numbered([1, 2, 3])]) is None
    assert EpochOrder().repeats([]) is False


def test_after_some_steps_the_first_batches_are_no_longer_waited_for():
    order = EpochOrder()
    for batch in itertools.islice(itertools.cycle(_numbered(range(MOST_STEPS))), MOST_STEPS + NUM_BATCHES):
        assert not order.repeats([batch])
    assert order.disabled


def _train(rank, sampler, **options):
    """Three epochs; what the log of this rank says."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 1), **options)
    loader = DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=4, sampler=sampler)
    with logged() as lines:
        for epoch in range(3):
            if hasattr(sampler, "right"):
                sampler.set_epoch(epoch)
            for (batch,) in loader:
                ddp(batch).sum().backward()
                ddp.zero_grad()
    return lines


def test_torchs_sampler_without_set_epoch_is_one_warning_of_rank_0(backend):
    def fn(rank, world_size):
        return _train(rank, DistributedSampler(range(40), world_size, rank))

    (line,), nothing = run_ranks(fn, 2, backend=backend)
    assert line.startswith(
        "DistributedDataParallel: steps 6 to 8 were given the batches of steps 1 to 3 again, in the same order"
    )
    assert "call sampler.set_epoch(epoch) before each epoch" in line
    assert nothing == []


@on_ranks(2)
def test_the_right_samplers_and_check_false_say_nothing(rank, world_size):
    right = DistributedSampler(range(40), world_size, rank)
    right.right = True
    ours = phalanx.DistributedSampler(range(40))
    forgotten = DistributedSampler(range(40), world_size, rank)
    assert [*_train(rank, right), *_train(rank, ours), *_train(rank, forgotten, check=False)] == []
