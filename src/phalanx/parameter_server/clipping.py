"""Compute the norm of gradients that are spread over servers; clip as `torch.nn.utils.clip_grad_norm_` does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Norms = Mapping[str, Tensor]  # the norms of gradients, by name


@dataclass(frozen=True)
class Clip:
    """A `Clip` is the maximum total norm of all gradients of a step."""

    max_norm: float
    norm_type: float

    def norm_of(self, gradient: Tensor) -> Tensor:
        """Return the norm of one gradient; for a sparse gradient, the norm of its values."""
        values = gradient._values() if gradient.is_sparse else gradient
        norm: Tensor = torch.linalg.vector_norm(values, self.norm_type) if values.numel() else values.new_zeros(())
        return norm

    def total(self, dense: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the total norm from the norm of each dense gradient and of each part of each table's gradient."""
        norms = [*dense, *(self._join(parts) for parts in rows)]
        return self._join(norms) if norms else torch.tensor(0.0, device="cpu")

    def _join(self, norms: Sequence[Tensor]) -> Tensor:
        joined: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), self.norm_type)
        return joined

    def factor(self, total: Tensor) -> Tensor:
        return torch.clamp(self.max_norm / (total + 1e-6), max=1.0)

    def scale(self, gradients: Iterable[Tensor], total: Tensor) -> None:
        """Multiply the gradients in place by `factor`."""
        factor = self.factor(total)
        for gradient in gradients:
            (gradient._values() if gradient.is_sparse else gradient).mul_(factor)


def make_clip(max_norm: float | None, norm_type: float) -> Clip | None:
    """Return a `Clip` if `max_norm` is given, else None.

    Raises:
        ValueError: `max_norm` or `norm_type` is invalid.
    """
    if max_norm is None:
        return None
    clip = Clip(float(max_norm), float(norm_type))
    if not clip.max_norm >= 0 or not clip.norm_type > 0:
        raise ValueError(
            "ParameterServer.push: max_norm must not be below zero, and norm_type above zero or infinity, got "
            f"{max_norm!r} and {norm_type!r}"
        )
    return clip
