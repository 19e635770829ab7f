"""Statistics of a batch, and of the batches of all ranks together."""

import pytest
import torch

from phalanx.nn.batch_statistics import combine, measure


@pytest.mark.parametrize("sizes", [(6,), (4, 2), (1, 1, 4), (3, 0, 2), (0, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_parts_combine_to_the_statistics_of_the_whole(sizes, dtype):
    values = torch.randn(sum(sizes), 3, 2, dtype=dtype)
    statistics = combine(torch.stack([measure(part) for part in values.split(sizes)]))
    variance, mean = torch.var_mean(values, [0, 2], correction=0)
    assert statistics.count == sum(sizes) * 2
    assert statistics.mean.dtype == dtype
    torch.testing.assert_close(statistics.mean, mean)
    torch.testing.assert_close(statistics.variance, variance)
    torch.testing.assert_close(statistics.unbiased_variance, torch.var(values, [0, 2]))


def test_a_mean_far_from_zero_costs_the_variance_no_digits():
    values = torch.randn(64, 2, generator=torch.Generator().manual_seed(1)) + torch.tensor([1e4, 0.0])
    statistics = combine(torch.stack([measure(part) for part in values.split(16)]))
    expected = values.double().var(0, correction=0)  # sums of squares would have no digit of it left
    torch.testing.assert_close(
        statistics.variance.double(), expected, rtol=1e-4, atol=0
    )  # sums of squares would have no digit left


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_are_measured_in_float32(dtype):
    values = (torch.randn(4096, 2) + 3).to(dtype)
    message = measure(values)
    assert message.dtype == torch.float32
    assert message[-1] == 4096  # more than either type can count to
    torch.testing.assert_close(combine(message[None]).mean.double(), values.double().mean(0), rtol=1e-6, atol=0)


def test_no_values_at_all_have_a_count_of_zero():
    statistics = combine(torch.stack([measure(torch.empty(0, 3)), measure(torch.empty(0, 3))]))
    assert statistics.count == 0
    assert statistics.mean.tolist() == [0.0, 0.0, 0.0]


def test_any_memory_format_is_measured_alike():
    values = torch.randn(2, 3, 4, 5)
    for other in (values.to(memory_format=torch.channels_last), values.transpose(2, 3).contiguous().transpose(2, 3)):
        torch.testing.assert_close(measure(other), measure(values))
