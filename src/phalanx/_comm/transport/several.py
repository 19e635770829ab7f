"""Handle several tensors in one call: copy inputs that outputs would overwrite, and reduce the tensors of one rank.

A call with several tensors runs one operation after another. An earlier operation may write memory that a later one
reads (the same tensor twice, overlapping views), but every operation must read the values from before the call:

    all_reduce_coalesced([t[:3], t[2:]])     t[:3] ◀─ sum of t[:3]      t[2:] ◀─ sum of a copy of t[2:], made before

The same holds within one operation for an input that overlaps an output: transports move large tensors piece by piece,
and would read pieces that they have overwritten. The exception is a rank's own part that is already at its destination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phalanx._base.core_numbers import AVG, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM
from phalanx._comm.transport.numerics import HALF
from phalanx._comm.transport.overlaps import extent_of, extents_overlap, overlaps_any
from phalanx._comm.transport.tensors import write_back

_COMBINE: dict[int, Callable[..., Tensor]] = {
    SUM: torch.add,
    PRODUCT: torch.mul,
    MIN: torch.minimum,
    MAX: torch.maximum,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}
"""The function that combines two tensors, by the number of the reduction."""
_WIDER = {torch.uint16: torch.int64, torch.uint32: torch.int64, **{dtype: torch.float32 for dtype in HALF}}
_SIGN = -(1 << 63)


def can_combine(redop: int) -> bool:
    """Return whether a reduction over ranks and over each rank's tensors is well-defined; a mean is not."""
    return redop != AVG


def combined(tensors: Sequence[Tensor], redop: int) -> Tensor:
    """Return the reduction of tensors of one shape and dtype, in their order, as a new tensor."""
    dtype = tensors[0].dtype
    combine = _COMBINE[redop]
    with torch.no_grad():
        # torch cannot reduce uint64: reduce as int64; for MIN and MAX, flip the sign bit to preserve the order
        if dtype == torch.uint64:
            flip = _SIGN if redop in (MIN, MAX) else 0
            signed = tensors[0].view(torch.int64) ^ flip
            for tensor in tensors[1:]:
                signed = combine(signed, tensor.view(torch.int64) ^ flip)
            return (signed ^ flip).view(dtype)
        total = tensors[0].to(_WIDER.get(dtype, dtype), copy=True)
        for tensor in tensors[1:]:
            total = combine(total, tensor.to(total.dtype))
        return total.to(dtype)


def copy_to_others(tensors: Sequence[Tensor], source: Tensor) -> None:
    """Write `source` to all of `tensors`; it may be one of them."""
    for tensor in tensors:
        write_back(tensor, source)


def unshared(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, own: tuple[int, int, int] | None = None
) -> Sequence[Tensor]:
    """Return the inputs of an operation that writes `outputs`, with copies of those that overlap an output.

    `own` = (i, o, skip) describes the part that stays on its rank: input i is not copied if it begins exactly `skip`
    bytes after the beginning of output o, as in an in-place call.
    """
    extents = [extent_of(tensor) for tensor in inputs]
    written = [extent_of(tensor) for tensor in outputs]
    if not extents_overlap(extents, written):
        return inputs
    read = list(inputs)
    for at, extent in enumerate(extents):
        is_in_place = own is not None and own[0] == at and extent[0] == written[own[1]][0] + own[2]
        if not is_in_place and overlaps_any(extent, written):
            read[at] = inputs[at].detach().clone()
    return read


def unshared_one(tensor: Tensor, output: Tensor, skip: int) -> Tensor:
    """Return the result of `unshared` for one input and one output; `skip` is as in `own`, and may be negative."""
    start, written = tensor.data_ptr(), output.data_ptr()
    if (start >= written + output.nbytes or written >= start + tensor.nbytes or start == written + skip) and (
        tensor.is_contiguous() and output.is_contiguous()
    ):
        return tensor
    return unshared([tensor], [output], own=(0, 0, skip))[0]


def unshared_steps(inputs: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """Return the inputs of steps of which step i writes outputs[i], with copies of inputs that earlier steps write.

    Cost: a copy of each such input; if there is none, one sort of the tensors' addresses.
    """
    if len(inputs) < 2:
        return inputs
    extents = [extent_of(tensor) for tensor in inputs]
    steps = [[extent_of(tensor) for tensor in step] for step in outputs]
    # Memory that a step both reads and writes counts once.
    apart = [extent for own, step in zip(extents, steps, strict=True) for extent in step if extent != own]
    if not extents_overlap(extents, apart):
        return inputs
    read = list(inputs)
    written: list[tuple[int, int]] = []
    for at, (extent, step) in enumerate(zip(extents, steps, strict=True)):
        if overlaps_any(extent, written):
            read[at] = inputs[at].detach().clone()
        written += step
    return read
