"""Find tensors that share memory; tensors that merely interleave, such as the columns of a matrix, do not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Extent = tuple[int, int]
_Part = tuple[int, list[tuple[int, int]], int]  # its address; its (stride in bytes, size), widest first; its index


def extent_of(tensor: Tensor) -> Extent:
    """Return where the memory of `tensor` begins and ends."""
    start = tensor.data_ptr()
    if tensor.is_contiguous() or not tensor.numel():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def extents_overlap(some: Sequence[Extent], others: Sequence[Extent]) -> bool:
    """Return whether any two of all these extents overlap."""
    if len(some) == len(others) == 1:
        return some[0][0] < others[0][1] and others[0][0] < some[0][1]
    reached = 0
    for start, end in sorted((*some, *others)):
        if start < reached:
            return True
        reached = end
    return False


def overlaps_any(extent: Extent, others: Sequence[Extent]) -> bool:
    """Return whether `extent` overlaps one of the others."""
    start, end = extent
    return any(start < other_end and other_start < end for other_start, other_end in others)


def find_shared(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the indices of two tensors that share the memory of an element; None if no two tensors do.

    The elements of any one tensor must not share memory, which `check_tensor` ensures for tensors that are written.

    Cost: one sort of the tensors' addresses for each dimension that interleaves the tensors. Only layouts that splits
    along dimensions cannot produce are checked element by element, with four bytes of memory per element.
    """
    return _find_in([_part(tensor, at) for at, tensor in enumerate(tensors) if tensor.numel()])


def _part(tensor: Tensor, at: int) -> _Part:
    width = tensor.element_size()
    steps = [(stride * width, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return tensor.data_ptr(), sorted([*steps, (1, width)], reverse=True), at


def _find_in(parts: list[_Part]) -> tuple[int, int] | None:
    """Return the indices of two parts that share memory, or None; examine only parts whose extents overlap."""
    cluster: list[_Part] = []
    reached = 0
    for part in sorted(parts):
        if part[0] >= reached:
            if len(cluster) > 1 and (found := _find_in_cluster(cluster)):
                return found
            cluster = []
        cluster.append(part)
        reached = max(reached, part[0] + _span(part[1]))
    return _find_in_cluster(cluster) if len(cluster) > 1 else None


def _span(steps: list[tuple[int, int]]) -> int:
    return 1 + sum(stride * (size - 1) for stride, size in steps)


def _find_in_cluster(parts: list[_Part]) -> tuple[int, int] | None:
    """Return the result of `_find_in` for parts whose extents form one contiguous piece of memory.

    The rows of a matrix repeat: if the first rows of all parts fit into one row, it is enough to compare these.

        row 0   a a b b b c │          a's first row │ b's │ c's     apart, and so are all rows
        row 1   a a b b b c │
    """
    widest = max(steps[0] for _, steps, _ in parts)[0]
    rows = [(start, steps[1:] if steps[0][0] == widest else steps, at) for start, steps, at in parts]
    first, last = min(start for start, _, _ in rows), max(start + _span(steps) for start, steps, _ in rows)
    if widest > 1 and last - first <= widest:
        return _find_in(rows)
    filled: _Part | None = None
    for part in parts:
        if _is_filled(part[1]):
            if filled is not None and part[0] < filled[0] + _span(filled[1]):
                return filled[2], part[2]
            filled = part  # it ends after all earlier filled parts, or it would share memory with one
    return _find_marked(parts)


def _is_filled(steps: list[tuple[int, int]]) -> bool:
    expected = 1
    for stride, size in reversed(steps):
        if stride != expected:
            return False
        expected *= size
    return True


def _find_marked(parts: list[_Part]) -> tuple[int, int] | None:
    """Find two parts that share memory by marking the elements of each."""
    first, last = min(start for start, _, _ in parts), max(start + _span(steps) for start, steps, _ in parts)
    unit = math.gcd(*(start - first for start, _, _ in parts), *(steps[-1][1] for _, steps, _ in parts))
    marks = torch.full(((last - first) // unit,), -1, dtype=torch.int32, device="cpu")
    for start, steps, at in parts:
        sizes = [*(size for _, size in steps[:-1]), steps[-1][1] // unit]
        mine = marks.as_strided(sizes, [*(stride // unit for stride, _ in steps[:-1]), 1], (start - first) // unit)
        if (owner := int(mine.max())) >= 0:
            return owner, at
        mine.fill_(at)
    return None
