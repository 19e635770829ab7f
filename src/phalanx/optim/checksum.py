"""Compute a checksum of tensors' bits on their own device, to notice a write that nothing has reported.

PyTorch counts the writes that autograd should know of (`_version`). Collectives, the unscaling of a GradScaler, writes
through `.data` and kernels of extensions change memory and count nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 16
_BLOCKS_AT_ONCE = 64  # so the products take 32 MB
# They are read as integers. In the exact sum none has 8 bytes: scaling by a power of two adds the same to each, and
# could be lost above 64 bits.
_WORDS = {1: torch.int8, 2: torch.int16}


def checksum(flats: Sequence[Tensor]) -> Tensor:
    """Return sums of the bits of `flats`, contiguous tensors of one dimension, as int64 on their device.

    There are two sums of the tensors of each width of element, taken one after the other. The first is exact, so that
    scaling by a power of two changes it, as long as a sign is left. The second is of all bytes in words of 8, with an
    odd factor for each place: a change of one word always changes it, and a change of sign or of order does, except by
    chance.

    Shape: (two for each width).
    Cost: a dozen kernels, which read the tensors twice, and a copy of them where they are several; 32 MB on the device.
    """
    sums: list[Tensor] = []
    for width in sorted({flat.element_size() for flat in flats}):
        words = [flat.detach().view(_WORDS.get(width, torch.int32)) for flat in flats if flat.element_size() == width]
        together = words[0] if len(words) == 1 else torch.cat(words)
        sums += together.sum(dtype=torch.int64), _placed(together)
    return torch.stack(sums)


def _placed(words: Tensor) -> Tensor:
    """Return the sum with a factor for each place, of words of 8 bytes, because few products take less time than many
    and these need no conversion.

    What begins between two words of 8 bytes in memory, as the slice of a parameter may, is read as it is.
    """
    placed = torch.zeros((), dtype=torch.int64, device=words.device)
    width = words.element_size()
    is_aligned = words.data_ptr() % 8 == words.storage_offset() * width % 8 == 0
    count = words.numel() * width // 8 * 8 // width if is_aligned else 0
    parts = [words[:count].view(torch.int64), words[count:]] if is_aligned else [words]
    for some in parts:
        for start in range(0, some.numel(), _BLOCK * _BLOCKS_AT_ONCE):
            placed = placed * _FACTOR + _sum_of_blocks(some[start : start + _BLOCK * _BLOCKS_AT_ONCE])
    return placed


def _sum_of_blocks(some: Tensor) -> Tensor:
    factors = _factors(some.device)
    whole = some.numel() // _BLOCK
    rest = some[whole * _BLOCK :]
    sums = [(rest * factors[: rest.numel()]).sum()] if rest.numel() else []
    if whole:
        sums.append(((some[: whole * _BLOCK].view(whole, _BLOCK) * factors).sum(1) * factors[:whole]).sum())
    return sum(sums[1:], sums[0])


_FACTOR = 0x2545F4914F6CDD1D  # it is odd


@functools.lru_cache(maxsize=32)
def _factors(device: torch.device) -> Tensor:
    """Return odd numbers in no order, which are the same in every call."""
    numbers = torch.randint(-(1 << 62), 1 << 62, (_BLOCK,), generator=torch.Generator().manual_seed(1))
    return (2 * numbers + 1).to(device)
