"""A checksum of a tensor's bits, where the tensor lies: by which a write is noticed that nobody told of.

PyTorch counts the writes that autograd should know of (`_version`). Collectives, the unscaling of a GradScaler, writes
through `.data` and kernels of extensions change memory and count nothing.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_BLOCK = 1 << 16
_BLOCKS_AT_ONCE = 64  # so that the products take 32 MB
# As integers. Of 8 bytes none: scaling by a power of two adds the same to each, and could be lost above 64 bits.
_WORDS = {1: torch.int8, 2: torch.int16}


def checksum(flat: Tensor) -> Tensor:
    """Two sums of the bits of `flat`, a contiguous tensor of one dimension, as int64 on its device; nothing waits.

    The first is exact, so that scaling by a power of two changes it, as long as a sign is left. The second has an odd
    factor for each place, which a change of one word can't hide from, nor, but by chance, a change of sign or of order.

    Shape: (2,).
    Cost: reads `flat` twice; 32 MB on the device while it runs.
    """
    words = flat.detach().view(_WORDS.get(flat.element_size(), torch.int32))
    plain = words.sum(dtype=torch.int64)
    placed = torch.zeros((), dtype=torch.int64, device=flat.device)
    factors = _factors(flat.device)
    for start in range(0, words.numel(), _BLOCK * _BLOCKS_AT_ONCE):
        some = words[start : start + _BLOCK * _BLOCKS_AT_ONCE]
        whole = some.numel() // _BLOCK
        sums = (some[: whole * _BLOCK].view(whole, _BLOCK) * factors).sum(1)
        rest = some[whole * _BLOCK :]
        placed = placed * _FACTOR + (sums * factors[:whole]).sum() + (rest * factors[: rest.numel()]).sum()
    return torch.stack((plain, placed))


_FACTOR = 0x2545F4914F6CDD1D  # odd


@functools.lru_cache(maxsize=32)
def _factors(device: torch.device) -> Tensor:
    """Odd numbers in no order, the same in every call."""
    numbers = torch.randint(-(1 << 62), 1 << 62, (_BLOCK,), generator=torch.Generator().manual_seed(1))
    return (2 * numbers + 1).to(device)
