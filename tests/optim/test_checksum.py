"""A checksum that notices what is done to gradients and parameters."""

import pytest
import torch

from phalanx.optim.staging import checksum

_BLOCK = 1 << 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_it_changes_with_scaling_signs_places_and_single_elements(dtype):
    """Of 2^21 elements a sum with factors 1, 3, 5 ... would not: their sum is a power of two."""
    for numel in (1, 7, _BLOCK, 2 * _BLOCK + 3):
        torch.manual_seed(0)
        flat = torch.randn(numel).to(dtype)
        changed = [flat * 2, flat / 1024, -flat]
        for place in {0, numel // 2, numel - 1}:
            changed.append(flat.clone())
            changed[-1][place] *= 1.5
        if numel > 1:
            changed += [flat.flip(0), flat.roll(1)]
            flat[1] = 0.0
            zero = flat.clone()
            zero[1] = -0.0
            changed.append(zero)
        before = checksum([flat])
        assert torch.equal(before, checksum([flat.clone()]))
        assert [torch.equal(before, checksum([other])) for other in changed] == [False] * len(changed)


def test_elements_that_are_all_alike_are_told_from_multiples_and_from_an_exchange_of_blocks():
    ones = torch.ones(1 << 21)
    assert not torch.equal(checksum([ones]), checksum([ones * 1024]))
    alternating = torch.tensor([1.0, -1.0]).repeat(1 << 20)
    assert not torch.equal(checksum([alternating]), checksum([-alternating]))
    blocks = torch.arange(130.0).repeat_interleave(_BLOCK)
    assert not torch.equal(checksum([blocks]), checksum([blocks.roll(64 * _BLOCK)]))
    assert checksum([torch.empty(0)]).tolist() == [0, 0]


def test_of_several_tensors_a_change_in_any_and_an_exchange_between_two_change_it():
    torch.manual_seed(0)
    flats = [
        torch.randn(5),
        torch.randn(70_000).bfloat16(),
        torch.randn(5),
        torch.randn(3).half(),
        torch.randn(2).double(),
    ]
    before = checksum(flats)
    assert torch.equal(before, checksum([flat.clone() for flat in flats]))
    for at, flat in enumerate(flats):
        changed = flat.clone()
        changed[-1] *= 2
        assert not torch.equal(before, checksum([*flats[:at], changed, *flats[at + 1 :]]))
    assert not torch.equal(before, checksum([flats[2], flats[1], flats[0], *flats[3:]]))


@pytest.mark.parametrize("numel", [1, 5, 3 * _BLOCK + 2])
@pytest.mark.parametrize("start", [0, 1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_slice_that_begins_anywhere_is_summed_whole(dtype, start, numel):
    torch.manual_seed(0)
    flat = torch.randint(1, 100, (start + numel,)).to(dtype)[start:]
    before = checksum([flat])
    for place in {0, 1, numel // 2, numel - 2, numel - 1} & set(range(numel)):
        kept = flat[place].clone()
        flat[place] += 1
        assert not torch.equal(before, checksum([flat])), place
        flat[place] = kept
    assert torch.equal(before, checksum([flat]))
