"""Cut a mini-batch into micro-batches along its first dimension, and join their results."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.pipeline.nested import tree_flatten, tree_unflatten

_Key = TypeVar("_Key")


def count_rows(values: Any, what: str) -> int:
    """Return the size that the tensors in `values` have in the first dimension; 0-dim tensors are ignored.

    Raises:
        ValueError: the sizes differ or are 0, or there is no such tensor.
    """
    tensors = [t for t in tree_flatten(values)[0] if isinstance(t, Tensor) and t.dim()]
    sizes = {t.shape[0] for t in tensors}
    if len(sizes) != 1:
        found = f"their sizes differ: {sorted(sizes)}" if sizes else "no tensor has one"
        raise ValueError(f"Pipeline: {what} is cut along the first dimension of its tensors, but {found}")
    (rows,) = sizes
    if rows == 0:
        raise ValueError(f"Pipeline: {what} has no rows: a mini-batch needs at least one sample")
    return int(rows)


def cut(rows: int, micro_batches: int) -> list[int]:
    """Return the rows of each micro-batch, as `Tensor.tensor_split` divides them, but without empty micro-batches."""
    count = min(rows, micro_batches)
    size, more = divmod(rows, count)
    return [size + (i < more) for i in range(count)]


def slice_rows(values: Any, begin: int, rows: int) -> Any:
    """Return `rows` rows from `begin` of each tensor in `values`; 0-dim tensors and other objects stay as they are."""
    leaves, tree = tree_flatten(values)
    return tree_unflatten([v[begin : begin + rows] if isinstance(v, Tensor) and v.dim() else v for v in leaves], tree)


def join(results: Sequence[Any], rows: Sequence[int]) -> Any:
    """Join the micro-batches' `results`, of `rows` rows each, into the mini-batch's result.

    Raises:
        TypeError: a value can't be joined: a 0-dim tensor, or an object that differs between micro-batches.
        ValueError: the size of a tensor's first dimension is not the number of samples, or the same multiple of it.
    """
    flat = [tree_flatten(result) for result in results]
    tree = flat[0][1]
    joined = []
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        if all(isinstance(part, Tensor) and part.dim() for part in parts):
            per_sample = {len(part) / count for part, count in zip(parts, rows, strict=True)}
            if len(per_sample) != 1 or not per_sample.pop().is_integer():
                raise ValueError(
                    "Pipeline: cannot join the results of the micro-batches: the model returns a tensor of shape "
                    f"{tuple(parts[0].shape)} for {rows[0]} samples, and samples must be its first dimension. Let the "
                    "model transpose this tensor, or not return it."
                )
            joined.append(torch.cat(parts))
        elif all(part is parts[0] or (not isinstance(part, Tensor) and part == parts[0]) for part in parts):
            joined.append(parts[0])
        else:
            raise TypeError(
                "Pipeline: cannot join the results of the micro-batches: the model returns "
                f"{_describe(parts[0])}, not tensors whose first dimension is that of the mini-batch"
            )
    return tree_unflatten(joined, tree)


def _describe(value: Any) -> str:
    return "a tensor without dimensions" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def slice_each(values: Mapping[_Key, Any], rows: Sequence[int]) -> list[dict[_Key, Any]]:
    """Return the values of each micro-batch: micro-batch i has the next `rows[i]` rows of every value."""
    begins = itertools.accumulate(rows, initial=0)
    return [
        {key: slice_rows(value, begin, count) for key, value in values.items()}
        for begin, count in zip(begins, rows, strict=False)
    ]
