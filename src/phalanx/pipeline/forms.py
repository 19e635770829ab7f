"""A `Form` describes the values that go from stage to stage: how they nest, and what each tensor is like."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from phalanx._comm.transport.memory_order import Strides


@dataclass(frozen=True)
class Form:
    """A form has values without their data: `leaves` has an `Array` for each tensor, or a constant.

    `tree` is empty if the values are the leaves.
    """

    tree: str
    leaves: tuple[Any, ...]

    def encode(self) -> bytes:
        """Return the form as bytes, which only an authenticated receiver reads."""
        return pickle.dumps(self)


class Array(NamedTuple):
    """An array is a tensor without its data: all dimensions but the first, and strides if not contiguous."""

    dtype: torch.dtype
    trailing: tuple[int, ...]
    is_scalar: bool
    needs_grad: bool
    strides: Strides | None
