"""Digests: equal for equal bytes, whatever the strides, and different for everything else that is tried."""

import itertools

import pytest
import torch

from phalanx.ddp.digest import digest, digests, find_differences
from phalanx.ddp.invisible import elements_of

SIZES = [0, 1, 7, 8, 1021, 2042, 5000]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64]
)
def test_every_single_change_changes_it(dtype):
    for size in SIZES:
        tensor = (torch.rand(size) * 3).to(dtype)
        before = digest(tensor)
        assert before.dtype == torch.int64
        assert digest(tensor.clone()) == before
        for position in {0, size // 2, size - 1} & set(range(size)):
            changed = tensor.clone()
            changed[position] = not changed[position] if dtype == torch.bool else changed[position] + 1
            assert digest(changed) != before


@pytest.mark.parametrize("size", [2, 64, 4096, 100_000])
def test_elements_in_another_order_change_it(size):
    tensor = torch.randn(size)
    assert digest(tensor.flip(0)) != digest(tensor)
    for distance in {1, size // 2, size - 1}:
        assert digest(tensor.roll(distance)) != digest(tensor)


def test_rows_of_a_weight_that_change_places_change_it():
    for width in (1024, 2048, 4096):
        weight = torch.randn(4, width)
        assert digest(weight[[1, 0, 2, 3]].flatten()) != digest(weight.flatten())


def test_zeros_of_each_size_differ():
    assert len({int(digest(torch.zeros(size))) for size in SIZES}) == len(SIZES)


def test_nans_and_signs_of_zero_are_bytes_like_others():
    values = [0.0, -0.0, float("nan"), float("inf")]
    found = [int(digest(torch.tensor([value]))) for value in values]
    assert len(set(found)) == len(found)
    assert digest(torch.tensor([float("nan")])) == found[2]


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(24.0).view(4, 6).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(9, dtype=torch.uint8)[1:],
        torch.arange(9, dtype=torch.float32)[3:],
        torch.randn(200_001)[1:],
        torch.randn(3)[3:],
    ],
    ids=lambda view: f"{tuple(view.shape)} {view.storage_offset()} {view.stride()}",
)
def test_the_place_in_memory_does_not_matter(view):
    elements = elements_of(view)
    assert digest(elements) == digest(elements.clone())


def test_random_tensors_all_differ():
    found = {int(digest(torch.randn(100))) for _ in range(500)}
    assert len(found) == 500


def test_digests_come_in_order_and_of_none_there_are_none():
    tensors = [torch.ones(3), torch.zeros(3)]
    assert digests([*tensors, None], torch.device("cpu")).tolist() == [*(int(digest(one)) for one in tensors), 0]
    assert digests([], torch.device("cpu")).tolist() == []


def test_differences_are_found_at_their_positions():
    assert find_differences([[1, 2, 3], [1, 2, 3]]) == []
    assert find_differences([[1, 2, 3], [1, 5, 3], [1, 2, 4]]) == [1, 2]
    assert find_differences([[1]]) == []
    assert find_differences([[], []]) == []
    assert find_differences([[0, 1], [5, 1], [0, 1]]) == []  # 0 is no value
    for rows in itertools.product([1, 2], repeat=3):
        assert find_differences([[row] for row in rows]) == ([0] if len(set(rows)) > 1 else [])
