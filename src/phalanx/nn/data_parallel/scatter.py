"""Cut a batch into one part per replica."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from phalanx.nn.data_parallel.containers import map_tensors, tensors_in


def scatter(value: Any, num_replicas: int, dim: int) -> list[Any]:
    """Return `value` once per replica, with a part of each tensor in its place; at most `num_replicas` times.

    Tensors are cut along `dim` as `torch.chunk` cuts them: into equal parts, the last one perhaps smaller, and into
    fewer parts than there are replicas when the batch is too small. Tuples, lists and dicts are copied; everything
    else is shared by the replicas.

    Cost: nothing is copied, parts are views.

    Raises:
        ValueError: a tensor has no dimension `dim`, or tensors come in different numbers of parts.
    """
    parts: dict[int, tuple[Tensor, ...]] = {}
    shapes: dict[int, tuple[int, ...]] = {}  # one example by number of parts
    for tensor in tensors_in(value):
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(
                f"DataParallel can't cut a tensor of shape {tuple(tensor.shape)} along dimension {dim}: every tensor "
                "that forward is given is cut. Pass a single number as a Python number, and what all replicas share "
                "as a buffer of the module"
            )
        chunks = parts[id(tensor)] = tensor.chunk(num_replicas, dim)
        shapes[len(chunks)] = tuple(tensor.shape)
    if len(shapes) > 1:
        (few, one), (many, other) = min(shapes.items()), max(shapes.items())
        raise ValueError(
            f"DataParallel was given tensors that don't belong together: along dimension {dim} shape {one} makes {few} "
            f"parts and shape {other} makes {many}. Give all tensors the same batch size"
        )
    count = next(iter(shapes), num_replicas)
    return [_take(number, value, parts) for number in range(count)]


def _take(number: int, value: Any, parts: dict[int, tuple[Tensor, ...]]) -> Any:
    return map_tensors(lambda tensor: parts[id(tensor)][number], value)
