"""Put the replicas' outputs together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.nn.data_parallel.containers import rebuild, rebuild_dict


def gather(outputs: Sequence[Any], dim: int) -> Any:
    """Return one output in the form of each of `outputs` (one per replica): tensors joined along `dim`, None kept.

    Scalars become a vector with an entry per replica, and a warning says so.

    Raises:
        ValueError: replicas returned different forms.
        TypeError: there is something that can't be joined.
    """
    first = outputs[0]
    if any(type(other) is not type(first) for other in outputs):
        kinds = ", ".join(type(output).__name__ for output in outputs)
        raise ValueError(f"DataParallel: replicas returned different things: {kinds}")
    if isinstance(first, Tensor):
        return _join(outputs, dim)
    if first is None:
        return None
    if isinstance(first, dict):
        if any(output.keys() != first.keys() for output in outputs):
            raise ValueError(
                f"DataParallel: replicas returned dicts with different keys: {[list(output) for output in outputs]}"
            )
        return rebuild_dict(first, {key: gather([output[key] for output in outputs], dim) for key in first})
    if isinstance(first, (tuple, list)):
        if any(len(output) != len(first) for output in outputs):
            lengths = [len(output) for output in outputs]
            raise ValueError(
                f"DataParallel: replicas returned a {type(first).__name__} of different lengths: {lengths}"
            )
        return rebuild(first, [gather(items, dim) for items in zip(*outputs, strict=True)])
    raise TypeError(
        f"DataParallel: forward returned {type(first).__name__}, which can't be joined over replicas. Return tensors, "
        "None, and tuples, lists and dicts of them"
    )


def _join(tensors: Sequence[Tensor], dim: int) -> Tensor:
    if all(tensor.dim() == 0 for tensor in tensors) and dim == 0:
        # PyTorch's words: who filters its warning has filtered ours.
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze and "
            "return a vector.",
            stacklevel=2,
        )
        return torch.stack(list(tensors))
    return torch.cat(list(tensors), dim)
