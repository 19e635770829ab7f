"""Describe each rank's range of a tensor as boxes, for torch.distributed.checkpoint.

The shard of a ZeroRedundancyOptimizer is a range of elements in memory order, and starts and ends anywhere:

    shape (4, 6), elements 4 to 20      . . . . X X      box 1: row 0, columns 4 to 6
                                        X X X X X X      box 2: rows 1 to 3, all columns
                                        X X X X X X
                                        X X . . . .      box 3: row 3, columns 0 to 2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Box:
    """A `Box` covers the elements `offsets` to `offsets + sizes` of a tensor.

    `start` is the position of its first element in the rank's range, in memory order.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def plan_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Split the elements `start` to `stop` of a row-major `shape` into boxes, in order: at most 2·dims - 1."""
    return list(_boxes(tuple(shape), start, stop, start))


def _boxes(shape: tuple[int, ...], start: int, stop: int, origin: int) -> Iterator[Box]:
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (stop - start,) * len(shape), start - origin)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # the range is inside one row
        yield from _in_row(shape, row, last, start, stop, origin)
        return
    yield from _in_row(shape, row, first - 1, start, first * row, origin)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row - origin)
    yield from _in_row(shape, row, last, last * row, stop, origin)


def _in_row(shape: tuple[int, ...], row: int, number: int, start: int, stop: int, origin: int) -> Iterator[Box]:
    base = number * row
    for box in _boxes(shape[1:], start - base, stop - base, origin - base):
        yield Box((number, *box.offsets), (1, *box.sizes), box.start)


class SlicedTensor:
    """`SlicedTensor` is a range of the elements of a tensor, in memory order: those of `flat`, from `start` on.

    `shape` and `stride` are those of the whole tensor.
    """

    def __init__(self, shape: Sequence[int], stride: Sequence[int], start: int, flat: Tensor) -> None:
        self.shape = torch.Size(shape)
        self.dtype = flat.dtype
        self.strides = tuple(stride)  # the strides of the whole tensor
        self._flat = flat
        # From here on the tensor is treated as row-major: its dimensions are in the order of their strides.
        self._order = sorted(range(len(self.shape)), key=lambda dim: (-stride[dim], dim))
        shape_in_memory = [self.shape[dim] for dim in self._order]
        self._boxes = {self._back(box.offsets): box for box in plan_boxes(shape_in_memory, start, start + len(flat))}

    def boxes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the offsets and sizes of the pieces."""
        return [(offsets, self._back(box.sizes)) for offsets, box in self._boxes.items()]

    def piece(self, offsets: Sequence[int]) -> Tensor:
        """Return the piece at `offsets`, as a view."""
        box = self._boxes[tuple(offsets)]
        piece = self._flat[box.start : box.start + math.prod(box.sizes)].view(box.sizes)
        return piece.permute([self._order.index(dim) for dim in range(len(self._order))])

    def _back(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Reorder `numbers` from memory order to the order of dimensions."""
        found = [0] * len(self._order)
        for number, dim in zip(numbers, self._order, strict=True):
            found[dim] = number
        return tuple(found)


def slice_state(shard: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the result of `shard_state_dict()` to the plain optimizer's form, with `SlicedTensor`s as tensors."""
    state = {}
    for number, part in shard["state"].items():
        shape, stride = shard["layout"][number]
        whole = part["stop"] - part["start"] == math.prod(shape)
        state[number] = {
            key: SlicedTensor(shape, stride, part["start"], value)
            if not whole
            and isinstance(value, Tensor)
            and value.dim() == 1
            and len(value) == part["stop"] - part["start"]
            else value
            for key, value in part["state"].items()
        }
    return {"state": state, "param_groups": shard["param_groups"]}
