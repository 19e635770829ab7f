"""Reduce tensors on a device with PyTorch's kernels, in the order of the ranks, as `csrc/reduce_body.h` does.

Half types are accumulated in float32 and rounded once, integers wrap, bool knows any and all. Sums, means and products
of real numbers have the bits that the CPU's have. Means of whole numbers are left to the CPU, and so are the smallest
and largest of unsigned ones wider than a byte, for which PyTorch has no kernels on devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.core_numbers import AVG, MAX, MIN, SUM
from phalanx.transport.numerics import HALF
from phalanx.transport.several import COMBINE

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def can_combine_on_device(dtype: torch.dtype, redop: int) -> bool:
    """Return whether `combine` knows this reduction of this dtype."""
    if redop in (MIN, MAX):
        return dtype not in _SIGNED
    return redop != AVG or dtype.is_floating_point or dtype.is_complex


def combine(out: Tensor, sources: Sequence[Tensor], redop: int) -> None:
    """Write the reduction of `sources`, in their order, to `out`; all contiguous, of one dtype, on one device."""
    if out.dtype in _SIGNED:  # these wrap alike
        signed = _SIGNED[out.dtype]
        out, sources = out.view(signed), [source.view(signed) for source in sources]
    apply = COMBINE[SUM if redop == AVG else redop]
    if out.dtype in HALF and (len(sources) > 2 or redop == AVG):
        total = sources[0].float()
        for source in sources[1:]:
            total = apply(total, source)
        out.copy_(_mean(total, len(sources)) if redop == AVG else total)
        return
    if len(sources) == 1:
        out.copy_(sources[0])
        return
    apply(sources[0], sources[1], out=out)
    for source in sources[2:]:
        apply(out, source, out=out)
    if redop == AVG:
        _mean(out, len(sources))


def _mean(total: Tensor, count: int) -> Tensor:
    """Divide `total` in place. The divisor is a tensor, since PyTorch's GPU kernels multiply by the reciprocal of a
    plain number.
    """
    parts = torch.view_as_real(total) if total.is_complex() else total
    parts.div_(torch.full((), count, dtype=parts.dtype, device=parts.device))
    return total
