"""Numbers in one byte: what is lost, and what must not be hidden."""

import pytest
import torch

from phalanx.ddp.hooks.blocks import decode, encode, message_bytes


def _there_and_back(values, block):
    message = encode(values, block)
    assert message.shape == (len(values), message_bytes(values.shape[1], block))
    assert message.dtype == torch.uint8
    return decode(message, block, values.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "numel", "block"), [(1, 1, 1), (1, 256, 256), (3, 12, 4), (2, 1024, 256), (4, 35, 7)])
def test_no_element_loses_more_than_half_a_step_of_its_block(dtype, rows, numel, block):
    values = torch.randn(rows, numel, generator=torch.Generator().manual_seed(0), dtype=dtype)
    values *= torch.logspace(-6, 6, numel, dtype=dtype)  # blocks of very different size
    lost = (_there_and_back(values, block) - values).abs().view(rows, -1, block)
    largest = values.abs().view(rows, -1, block).amax(2, keepdim=True)
    assert (lost <= largest / 254 * (1 + 1e-5)).all()


def test_the_error_contracts_even_where_every_element_lies_between_two_steps():
    block = 256
    worst = torch.full((1, block), 0.5 / 127)
    worst[0, 0] = 1.0
    lost = (_there_and_back(worst, block) - worst).square().sum()
    assert 0 < lost <= block / 254**2 * worst.square().sum() * (1 + 1e-5)


def test_zeros_whole_steps_and_the_largest_element_are_kept_exactly():
    values = torch.arange(-127.0, 129.0).clamp(max=127).view(1, 256)
    assert torch.equal(_there_and_back(values, 256), values)
    assert torch.equal(_there_and_back(torch.zeros(2, 8), 4), torch.zeros(2, 8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_shows_in_its_whole_block_and_in_no_other(bad):
    values = torch.ones(2, 8)
    values[1, 5] = bad
    back = _there_and_back(values, 4)
    assert back[1, 4:].isnan().all()
    assert torch.equal(back[0], values[0])
    assert torch.equal(back[1, :4], values[1, :4])


@pytest.mark.parametrize("tiny", [1e-45, 1e-43, 2e-43, 1e-38])
def test_numbers_below_the_normal_range_come_out_finite_and_no_larger_than_they_are(tiny):
    values = torch.tensor([[tiny, -tiny, 0.0, tiny / 2]])
    back = _there_and_back(values, 4)
    assert back.isfinite().all()
    assert (back.abs() <= values.abs().max() * 1.5).all()
